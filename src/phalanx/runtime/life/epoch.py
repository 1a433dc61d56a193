"""Who a group consists of now, and where it is in its life."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from phalanx.declare.spec import MethodSpec
from phalanx.errors import PhalanxError
from phalanx.runtime.life.lifecycle import (
    BreakEvent,
    ClosedEvent,
    CloseEvent,
    Event,
    Lifecycle,
    RestartEvent,
    StartedEvent,
    State,
)
from phalanx.topology.mesh import Mesh
from phalanx.transport.base import Endpoint, Transport


@dataclass(frozen=True)
class GroupCard:
    """What a view of a group in another process needs to know; travels with the group's handles."""

    name: str
    number: int
    methods: dict[str, dict[str, MethodSpec]]
    callables: dict[str, frozenset[str]]
    classes: dict[str, str]
    meshes: dict[str, Mesh] = field(default_factory=dict[str, Mesh])
    call_timeout: float | None = None
    stall_report_after: float | None = None
    pool: str = ""
    detached: bool = False
    asynchronous: bool = False


class Epoch:
    """The roster of a group from one change of its members to the next.

    An endpoint is one *incarnation* of its rank: the process that is the rank until another one is. The roster never
    changes; a group swaps its epoch whole. ``endpoints`` is empty while the processes are being started.
    """

    __slots__ = ("endpoints", "meshes", "nodes", "number", "size", "stopped")

    def __init__(self, number: int, size: int, endpoints: Sequence[Endpoint] = ()) -> None:
        self.number = number
        self.size = size
        self.endpoints = tuple(endpoints)
        self.nodes = tuple(endpoint.facts.slot.node_id for endpoint in endpoints)  # by rank
        self.meshes: dict[str, Mesh] = {}  # those that its ranks told of
        self.stopped: set[int] = set()  # ranks that were stopped on purpose

    def has_kept(self, ranks: Sequence[int], since: Epoch) -> bool:
        """Whether these ranks are still the processes that they were in an earlier epoch."""
        if self is since:
            return True
        mine, theirs = self.endpoints, since.endpoints
        return all(rank < len(mine) and rank < len(theirs) and mine[rank] is theirs[rank] for rank in ranks)

    def dead(self, transport: Transport) -> list[int]:
        """The ranks that are known to be gone; cheap."""
        return [rank for rank, endpoint in enumerate(self.endpoints) if not transport.alive(endpoint)]


class Ground(Protocol):
    """What the ranks of a group stand on: slots, which are given back once nobody in this process holds them."""

    def keep(self) -> None:
        """Hold them also for others."""
        ...


class GroupLife:
    """Card, present epoch and state of a group. ``owner`` is False in a view that came from another process."""

    def __init__(self, card: GroupCard, transport: Transport, size: int, *, owner: bool) -> None:
        self.card = card
        self.name = card.name
        self.transport = transport
        self.owner = owner
        self.lifecycle = Lifecycle(card.name)
        self.epoch = Epoch(0, size)
        #: Held by whoever can call the group, or waits for a call of it.
        self.ground: Ground | None = None
        self._lock = threading.RLock()
        #: Told of each change of state or epoch, quickly.
        self.on_change: Callable[[], None] | None = None
        #: Fetches what was gathered on the ranks, within so many seconds; called before their processes end.
        self.before_end: list[Callable[[float], None]] = []
        #: The newest versions of weights that its roles had, and published, by (role, name); restarts know of them.
        self.had_weights: dict[tuple[str, str], int] = {}
        self.published_weights: dict[tuple[str, str], int] = {}
        #: Of which version the weights of its roles are, in words, by ``role.name``.
        self.weights: dict[str, str] = {}
        #: When its state or its epoch changed, as a Unix time.
        self.changed = time.time()

    @property
    def closed(self) -> bool:
        """Whether the group takes no calls because it was closed, here or by its owner."""
        return self.lifecycle.state in (State.CLOSING, State.CLOSED)

    def check_current(self, epoch: Epoch, ranks: Sequence[int], method: str) -> None:
        """See to it that the ranks of a call are still the processes that it was made for.

        Raises:
            StaleEpoch: they are not.
        """
        if self.epoch is not epoch and not self.epoch.has_kept(ranks, epoch):
            raise self.lifecycle.stale_error(epoch.number, method)

    def enter(self, endpoints: Sequence[Endpoint]) -> Epoch:
        """Begin the epoch that the lifecycle is in, with these processes."""
        with self._lock:
            self.epoch = Epoch(self.lifecycle.epoch, len(endpoints), endpoints)
            self.weights = {}
        self._tell()
        return self.epoch

    def started(self) -> None:
        """Note that all ranks are there."""
        self._handle(StartedEvent(self.lifecycle.epoch))

    def begin_restart(self) -> Epoch:
        """Leave the present epoch, and give it; until :meth:`enter` the next one has no processes.

        Raises:
            GroupClosed: the group is closed.
        """
        with self._lock:
            if self.closed:
                self.lifecycle.check_callable()
            left = self.epoch
            self.lifecycle.handle(RestartEvent())
            self.epoch = Epoch(self.lifecycle.epoch, left.size)
        self._tell()
        return left

    def broken(self, cause: PhalanxError, epoch: Epoch | None = None) -> None:
        """Note that the group takes no more calls, and why; what an earlier epoch still reports does nothing."""
        self._handle(BreakEvent(self.lifecycle.epoch if epoch is None else epoch.number, cause))

    def begin_close(self) -> bool:
        """Take no more calls. False if somebody has begun to close the group before."""
        with self._lock:
            first = not self.closed
            self._handle(CloseEvent())
            return first

    def finish_close(self) -> None:
        """Note that nothing of the group is left."""
        with self._lock:
            if self.lifecycle.state is State.CLOSING:
                self._handle(ClosedEvent())

    def _handle(self, event: Event) -> None:
        with self._lock:
            self.lifecycle.handle(event)
            self._tell()

    def note_weights(self, role: str, name: str, text: str) -> None:
        """Note what came of a sync of a role's weights, for those who look at the group from beside it."""
        with self._lock:
            self.weights = {**self.weights, (f"{role}.{name}" if role else name): text}
        if self.on_change is not None:
            self.on_change()

    def _tell(self) -> None:
        self.changed = time.time()
        if self.on_change is not None:
            self.on_change()
