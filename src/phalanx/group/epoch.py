"""Who a group consists of now, and where it is in its life."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import Endpoint
from phalanx.declare.spec import MethodSpec
from phalanx.errors import CallError, PhalanxError
from phalanx.group.lifecycle import (
    BreakEvent,
    ClosedEvent,
    CloseEvent,
    Event,
    Lifecycle,
    MembersEvent,
    RestartEvent,
    StartedEvent,
    State,
    ToldEvent,
)
from phalanx.group.preemption import NoticeQueue, PreemptionNotice
from phalanx.group.snapshot_placement import Snapshot
from phalanx.topology.mesh import Mesh


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
    independent: bool = False


class Epoch:
    """The roster of a group from one change of its members to the next.

    An endpoint is one *incarnation* of its rank: the process that is the rank until another one is. The roster never
    changes; a group swaps its epoch whole. ``endpoints`` is empty while the processes are being started.

    Behind the ``size`` ranks that calls go to there may be others: those of a group that grows, which are ``joining``
    and get their weights, or those of one that shrinks, which finish what they have.
    """

    __slots__ = ("endpoints", "everyone", "joining", "meshes", "nodes", "number", "size", "stay", "stopped")

    def __init__(
        self,
        number: int,
        size: int,
        endpoints: Sequence[Endpoint] = (),
        *,
        joining: bool = False,
        stay: Sequence[Endpoint | None] = (),
    ) -> None:
        self.number = number
        self.size = size
        self.joining = joining
        self.everyone = tuple(range(size))
        self.endpoints = tuple(endpoints)
        self.stay = stay  # of one without endpoints: by rank, who will be among them
        self.nodes = tuple(endpoint.facts.slot.node_id for endpoint in endpoints)  # by rank
        self.meshes: dict[str, Mesh] = {}  # those that its ranks told of
        self.stopped: set[int] = set()  # ranks that were stopped on purpose

    def has_kept(self, ranks: Sequence[int], since: Epoch) -> bool:
        """Whether these ranks are still the processes that they were in an earlier epoch."""
        if self is since:
            return True
        mine, theirs = self.endpoints or self.stay, since.endpoints
        return all(
            rank < len(theirs) and (theirs[rank].retired or (rank < len(mine) and mine[rank] is theirs[rank]))
            for rank in ranks
        )

    def takes(self, ranks: Sequence[int], since: Epoch) -> bool:
        """Whether a call made for these ranks in an earlier epoch can still be sent to them."""
        mine, theirs = self.endpoints, since.endpoints
        there = min(self.size, len(mine), len(theirs))  # none of them are while the group restarts
        return all(rank < there and mine[rank] is theirs[rank] for rank in ranks)

    @property
    def reached(self) -> tuple[int, ...]:
        """The ranks that weights go to: those that join need them before they get calls."""
        return tuple(range(len(self.endpoints))) if self.joining else self.everyone

    def dead(self, transport: Backend) -> list[int]:
        """The ranks that calls go to and that are known to be gone; cheap."""
        return transport.dead_of(self.endpoints[: self.size])


class Ground(Protocol):
    """What the ranks of a group stand on: slots, which are given back once nobody in this process holds them."""

    def keep(self) -> None:
        """Hold them also for others."""
        ...


class GroupState:
    """Card, present epoch and state of a group. ``owner`` is False in a view that came from another process."""

    def __init__(
        self, card: GroupCard, transport: Backend, size: int, *, owner: bool, number: int = 0
    ) -> None:
        self.card = card
        self.name = card.name
        self.transport = transport
        self.owner = owner
        self.lifecycle = Lifecycle(card.name, epoch=number)
        self.epoch = Epoch(number, size)
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
        #: What is known of nodes that will be taken away.
        self.notices = NoticeQueue(card.name)
        #: Told of each notice, on the watchman's thread.
        self.on_notice: Callable[[PreemptionNotice], object] | None = None
        #: When the constructors of each rank began and ended at the last start, as Unix times.
        self.constructed: Sequence[tuple[float, float]] = ()
        #: What was last copied of the ranks' states, and in which epoch.
        self.snapshot: Snapshot | None = None
        self.snapshot_epoch = -1
        #: By rank: those of its processes that came with this epoch or later, and are gone, have left in peace.
        self.in_peace_since: dict[int, int] = {}
        self._behind = 0  # ranks that the epoch before a restart had
        #: Of a view elsewhere: notes that the ranks are others by now, or will be; False where the owner has closed it.
        self.changed_elsewhere: Callable[[], bool] | None = None
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
            number = self.lifecycle.epoch
            self.epoch = Epoch(number, len(endpoints), endpoints)
            self.weights = {}
            ended = [*_numbered(endpoints, number), *range(len(endpoints), self._behind)]
            self.in_peace_since.update(dict.fromkeys(ended, number))
            self._behind = 0
        self._tell()
        return self.epoch

    def started(self) -> None:
        """Note that all ranks are there."""
        self._handle(StartedEvent(self.lifecycle.epoch))

    def change(self, endpoints: Sequence[Endpoint], size: int, *, joining: bool = False) -> Epoch:
        """Begin the next epoch with ranks that come or go, while the others are at work.

        Raises:
            GroupClosed, GroupBroken: the group takes no calls.
        """
        with self._lock:
            if self.lifecycle.state is not State.READY:
                self.lifecycle.check_callable()
            left = self.epoch
            self.lifecycle.handle(MembersEvent())
            self.epoch = Epoch(self.lifecycle.epoch, size, endpoints, joining=joining)
            self.epoch.stopped = left.stopped
            _numbered(endpoints, self.epoch.number)
            self.snapshot = None  # of other ranks
        self._tell()
        return self.epoch

    def told(self, endpoints: Sequence[Endpoint], number: int) -> None:
        """Go on with the ranks of an epoch that the owner, in another process, has begun."""
        with self._lock:
            if self.closed:
                return
            self.lifecycle.handle(ToldEvent(number))
            self.epoch = Epoch(number, len(endpoints), endpoints)
        self._tell()

    def begin_restart(self, size: int | None = None, gone: Collection[int] | None = None) -> Epoch:
        """Leave the present epoch, and give it; until :meth:`enter` the next one has no processes.

        ``size`` is the number of ranks that it will have, where that is another. ``gone`` are those that get other
        processes, where not all do: calls of the others go on.

        Raises:
            GroupClosed: the group is closed.
        """
        with self._lock:
            if self.closed:
                self.lifecycle.check_callable()
            left = self.epoch
            self._behind = max(self._behind, len(left.endpoints))
            self.lifecycle.handle(RestartEvent())
            here = enumerate(left.endpoints[: left.size] if gone is not None else ())
            stay = [None if rank in (gone or ()) else endpoint for rank, endpoint in here]
            self.epoch = Epoch(self.lifecycle.epoch, left.size if size is None else size, stay=stay)
        self._tell()
        return left

    def broken(self, cause: PhalanxError, epoch: Epoch | None = None) -> None:
        """Note that the group takes no more calls, and why.

        What an earlier epoch still reports does nothing, unless it is about a rank that this one has kept.
        """
        with self._lock:
            number = self.lifecycle.epoch if epoch is None else epoch.number
            ranks = cause.cause_ranks if isinstance(cause, CallError) else ()
            if epoch is not None and epoch is not self.epoch and ranks and self.epoch.takes(ranks, epoch):
                number = self.lifecycle.epoch
            self._handle(BreakEvent(number, cause))

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


def _numbered(endpoints: Sequence[Endpoint], number: int) -> list[int]:
    """Say of processes that are new with which epoch they came; their ranks."""
    new = [rank for rank, endpoint in enumerate(endpoints) if endpoint.since < 0]
    for rank in new:
        endpoints[rank].since = number
    return new
