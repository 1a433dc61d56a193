"""The state of a group as its handles share it: what it is made of, and where it is in its life."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

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
class GroupRecord:
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


class GroupState:
    """Endpoints and life of a group. ``owner`` is False in a view that came from another process."""

    def __init__(
        self, record: GroupRecord, transport: Transport, endpoints: list[Endpoint], owner: bool
    ) -> None:
        self.record = record
        self.transport = transport
        self.endpoints = endpoints
        self.owner = owner
        self.lifecycle = Lifecycle(record.name)
        self._life = threading.RLock()
        #: Told of each change of state, quickly.
        self.on_change: Callable[[], None] | None = None
        self._stopped: set[int] = set()  # ranks of this epoch that were stopped on purpose

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def epoch(self) -> int:
        return self.lifecycle.epoch

    @property
    def world_size(self) -> int:
        return len(self.endpoints)

    @property
    def closed(self) -> bool:
        """Whether the group takes no calls because it was closed, here or by its owner."""
        return self.lifecycle.state in (State.CLOSING, State.CLOSED)

    def now(self) -> float:
        """Seconds on the clock by which the backend waits."""
        return self.transport.now()

    def _handle(self, event: Event) -> None:
        with self._life:
            self.lifecycle.handle(event)
            if self.on_change is not None:
                self.on_change()

    def started(self) -> None:
        """Note that all ranks are there."""
        self._stopped.clear()
        self._handle(StartedEvent(self.epoch))

    def begin_restart(self) -> None:
        """Begin a new epoch.

        Raises:
            GroupClosed: the group is closed.
        """
        with self._life:
            if self.closed:
                self.lifecycle.check_callable()
            self._handle(RestartEvent())

    def broken(self, cause: PhalanxError, epoch: int | None = None) -> None:
        """Note that the group takes no more calls, and why."""
        self._handle(BreakEvent(self.epoch if epoch is None else epoch, cause))

    def begin_close(self) -> bool:
        """Take no more calls. False if somebody has begun to close the group before."""
        with self._life:
            first = not self.closed
            self._handle(CloseEvent())
            return first

    def finish_close(self) -> None:
        """Note that nothing of the group is left."""
        with self._life:
            if self.lifecycle.state is State.CLOSING:
                self._handle(ClosedEvent())
