"""Ranks that are values: what a call waits for, without processes and without time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.backends.backend_types import (
    Endpoint,
    FetchFailed,
    Lost,
    NotReady,
    ProcessStatus,
    RankOutcome,
    Ticket,
)
from phalanx.calls.call import Call
from phalanx.calls.listeners import Listeners
from phalanx.dispatch.plan import CallPlan, GatherPlan
from phalanx.group.epoch import GroupCard
from phalanx.group.group import Group
from phalanx.topology.slots import Slot, SlotFacts
from phalanx.wire.failure import capture
from phalanx.wire.messages import ProcessInfo

_PLACE = SlotFacts("node", "host", "127.0.0.1")
LATE = object()  # the outcome of a rank that has not ended


@dataclass
class FakeBackend:
    """Notes what it is told to do to processes; its clock moves when somebody waits in vain."""

    immediate: bool = False
    name: str = "fake"
    time: float = 0.0
    dead: set[int] = field(default_factory=set[int])
    gone: set[int] = field(default_factory=set[int])
    killed: list[int] = field(default_factory=list[int])
    severed: list[int] = field(default_factory=list[int])
    drops: set[int] = field(default_factory=set[int])

    def now(self) -> float:
        return self.time

    def dead_of(self, endpoints: Sequence[Endpoint]) -> list[int]:
        return [position for position, endpoint in enumerate(endpoints) if endpoint.handle in self.dead]

    def kill(self, endpoints: Sequence[Endpoint]) -> tuple[int, ...]:
        self.killed += [endpoint.handle for endpoint in endpoints]
        return ()

    def sever(self, endpoints: Sequence[Endpoint]) -> None:
        self.severed += [endpoint.handle for endpoint in endpoints]

    def cancel(self, endpoints: Sequence[Endpoint], ids: Sequence[int]) -> list[bool]:
        return [endpoint.handle in self.drops for endpoint in endpoints]

    def sights(self, endpoints: Sequence[Endpoint], stacks: bool) -> list[ProcessStatus]:
        return [
            ProcessStatus(True, running={7: 1.0}, stack=f"stack of {e.handle}", gone=e.handle in self.gone)
            for e in endpoints
        ]

    def post_mortem(self, endpoint: Endpoint, lost: Lost | None) -> Lost:
        return lost or Lost("it is gone", "node lost" if endpoint.handle in self.gone else "signal SIGKILL")


@dataclass
class FakeArrivals:
    """Outcomes by position; ``LATE`` ones never come."""

    backend: FakeBackend
    outcomes: list[Any]
    disregarded: bool = False

    def __len__(self) -> int:
        return len(self.outcomes)

    def fetch(self, timeout: float | None) -> list[Any]:
        if any(isinstance(one, Exception | Lost) for one in self.outcomes):
            raise FetchFailed
        self._wait_for_all(timeout)
        return list(self.outcomes)

    def _wait_for_all(self, timeout: float | None) -> None:
        if LATE in self.outcomes:
            self.backend.time += timeout or 0.0
            raise NotReady

    def output(self, position: int) -> Any:
        if isinstance(self.outcomes[position], Exception | Lost):
            raise FetchFailed
        return self.outcomes[position]

    def wait(
        self, positions: Sequence[int], count: int, timeout: float | None
    ) -> tuple[list[int], list[int]]:
        ended = [position for position in positions if self.outcomes[position] is not LATE][:count]
        if len(ended) < min(count, len(positions)):
            self.backend.time += timeout or 0.0
        return ended, [position for position in positions if position not in ended]

    def outcome(self, position: int) -> RankOutcome:
        one = self.outcomes[position]
        if isinstance(one, Lost):
            return RankOutcome(lost=one)
        if isinstance(one, Exception):
            return RankOutcome(failure=capture(one, rank=position))
        return RankOutcome(one)

    def pending(self, timeout: float | None = 0.0) -> list[int]:
        return self.wait(range(len(self)), len(self), timeout)[1]

    def call_ids(self) -> list[int]:
        return [7] * len(self.outcomes)

    def disregard(self) -> None:
        self.disregarded = True

    def leave(self) -> None:
        pass

    def reference(self, position: int) -> Ticket:
        return Ticket(position)


def endpoints(count: int, first: int = 0) -> list[Endpoint]:
    """Processes that are numbers, in the order of their ranks."""
    return [
        Endpoint(Slot(0, rank, ""), first + rank, ProcessInfo(_PLACE, first + rank, 0.0, 0))
        for rank in range(count)
    ]


def group_of(count: int, transport: FakeBackend | None = None, *, owner: bool = True) -> Group:
    """A group that is ready, whose calls wait 2 s for other ranks once one has failed."""
    card = GroupCard("actor", 1, {"": {}}, {"": frozenset()}, {"": "Actor"})
    group = Group(card, transport or FakeBackend(), count, owner=owner)  # pyright: ignore[reportArgumentType]
    group.grace_s = 2.0
    group.enter(endpoints(count))
    group.started()
    return group


def call_on(group: Group, *outcomes: Any, listeners: Listeners | None = None, **options: Any) -> Call:
    """A call of all ranks that was sent, and ends as ``outcomes`` say."""
    ranks = range(len(outcomes))
    plan = CallPlan(ranks, (), {}, GatherPlan("list", ranks))
    call = Call(group, group.epoch, plan, "", "update", 7, listeners or Listeners(), **options)
    call.arrivals = FakeArrivals(group.backend, list(outcomes))  # pyright: ignore[reportArgumentType]
    call.was_sent = True
    return call
