"""What a group and all views of it share: endpoints, the order of calls, and the state of the group."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.config import settings
from phalanx.declare.spec import MethodSpec
from phalanx.dispatch.plan import CallPlan
from phalanx.errors import CallTimeout, DispatchError, GroupClosed, PhalanxError, StaleEpoch
from phalanx.runtime.future import CallFuture
from phalanx.runtime.lifecycle import (
    BreakEvent,
    ClosedEvent,
    CloseEvent,
    Event,
    Lifecycle,
    StartedEvent,
    State,
)
from phalanx.runtime.sender import messages
from phalanx.runtime.supervisor import FetchFailed, NotReady, Watch, settled_value
from phalanx.topology.mesh import Mesh
from phalanx.transport.base import Endpoint, Ticket, Transport
from phalanx.wire.codec import Policy
from phalanx.wire.messages import MESHES, RankCall

Methods = Mapping[str, Mapping[str, MethodSpec]]


@dataclass
class Statistics:
    """Counts of one group since it was started."""

    calls: int = 0
    failed: int = 0
    fetched_bytes: int = 0


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


class GroupCore:
    """The shared part of a group. ``owner`` is False in a view that came from another process."""

    def __init__(
        self, record: GroupRecord, transport: Transport, endpoints: list[Endpoint], owner: bool
    ) -> None:
        self.record = record
        self.transport = transport
        self.endpoints = endpoints
        self.owner = owner
        self.lifecycle = Lifecycle(record.name)
        self.statistics = Statistics()
        self._settings = settings()
        self._life = threading.RLock()
        self._order = threading.Lock()  # calls reach all ranks in one order, whichever threads make them
        self._numbers = itertools.count(1)
        self._registered: dict[str, Mesh] = {}
        self._under_way: deque[weakref.ref[CallFuture[Any]]] = deque()
        self._counts = [0] * len(endpoints)

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def epoch(self) -> int:
        return self.lifecycle.epoch

    @property
    def world_size(self) -> int:
        return len(self.endpoints)

    def send(
        self,
        plan: CallPlan,
        spec: MethodSpec,
        role: str,
        timeout: float | None,
        target: Any,
        *,
        describe: bool = False,
    ) -> CallFuture[Any]:
        """Send one call to its ranks; does not wait for it.

        ``describe`` asks each rank for the row count of its output beside the output, for a future that may be
        handed on by reference.

        Raises:
            GroupClosed, GroupBroken: the group takes no calls.
            DispatchError: an argument cannot be pickled.
        """
        self.lifecycle.check_callable()
        self._make_room()
        header = RankCall(
            call=next(self._numbers),
            epoch=self.epoch,
            role=role,
            method=spec.name,
            keep=True,
            describe=describe,
            readonly=spec.readonly,
            to_device=spec.to_device,
            body=None,
        )
        limit = timeout if timeout is not None else self.record.call_timeout
        with self._order:
            tickets = self._submit(plan, header, describe)
        self.statistics.calls += 1
        future: CallFuture[Any] = CallFuture(self, plan, tickets, spec.name, role, limit, target)
        for rank in plan.ranks:
            self._counts[rank] += 1
        self._under_way.append(weakref.ref(future))
        return future

    def _submit(self, plan: CallPlan, header: RankCall, describe: bool) -> list[Ticket]:
        submit, endpoints = self.transport.submit, self.endpoints
        composed = messages(self.transport, plan, header, self._settings.inline_bytes)
        return [
            submit(endpoints[rank], header.role, header.method, data, refs, describe)
            for rank, (data, refs) in zip(plan.ranks, composed, strict=True)
        ]

    def _make_room(self) -> None:
        """Wait for the oldest call where too many are under way; calls that nobody holds any more do not count."""
        while len(self._under_way) >= self._settings.max_in_flight:
            oldest = self._under_way.popleft()()
            if oldest is not None and not oldest.done():
                self.transport.wait([t.value for t in oldest.tickets], len(oldest.tickets), None)

    def ended(self, future: CallFuture[Any]) -> None:
        """Book that a call is over; once per call."""
        if not future.counted_out:
            future.counted_out = True
            for rank in future.plan.ranks:
                self._counts[rank] -= 1

    def least_busy(self, ranks: Sequence[int]) -> int:
        """The rank with the fewest calls under way; the lowest of equal ones."""
        for reference in list(self._under_way):
            future = reference()
            if future is not None and not future.counted_out and self.all_ended(future):
                self.ended(future)
        return min(ranks, key=lambda rank: (self._counts[rank], rank))

    def watch(self, future: CallFuture[Any]) -> Watch:
        """The watch over a call."""
        endpoints = [self.endpoints[rank] for rank in future.plan.ranks]
        refs = [ticket.value for ticket in future.tickets]
        grace = self._settings.grace_s
        watch = Watch(
            self.transport, self.name, future.method, future.role, future.plan.ranks, endpoints, refs, grace
        )
        watch.started = future.started
        return watch

    def settle(self, future: CallFuture[Any], limit: float | None) -> Any:
        """Wait for a call and give its value, or raise its one error."""
        self._check_epoch(future)
        watch = self.watch(future)
        limits = [at for at in (limit, future.deadline) if at is not None]
        try:
            return settled_value(future, watch, min(limits) if limits else None, future.target)
        except NotReady:
            raise self._late(future, watch, limit) from None
        except FetchFailed:
            raise self.failed(watch) from None

    def _check_epoch(self, future: CallFuture[Any]) -> None:
        if future.epoch != self.epoch:
            raise StaleEpoch(
                f"group {self.name!r} was restarted: this call of {future.method} belongs to epoch {future.epoch}, the "
                f"group is in epoch {self.epoch}; make the call again",
                group=self.name,
                epoch=future.epoch,
                current=self.epoch,
            )

    def _late(self, future: CallFuture[Any], watch: Watch, limit: float | None) -> CallTimeout:
        now = time.monotonic()
        if future.deadline is None or now < future.deadline:
            waited = (limit or now) - watch.started
            return watch.timeout(round(max(0.0, waited), 3))[0]
        error, pending = watch.timeout(future.timeout)
        self._stop(pending, watch)
        self.broken(error)
        return error

    def failed(self, watch: Watch) -> PhalanxError:
        """The one error of a call of which a rank failed; breaks the group where a rank is lost or still busy."""
        if self.closed:
            return GroupClosed(f"group {self.name!r} was closed before {watch.method} ended", group=self.name)
        self.statistics.failed += 1
        error, pending, died = watch.error()
        self._stop(pending, watch)
        if isinstance(error, GroupClosed):
            self.begin_close()
            self.finish_close()
        elif pending or died:
            self.broken(error)
        return error

    def _stop(self, positions: Sequence[int], watch: Watch) -> None:
        if positions:
            self.transport.kill([watch.endpoints[position] for position in positions])

    def _handle(self, event: Event) -> None:
        with self._life:
            self.lifecycle.handle(event)

    @property
    def closed(self) -> bool:
        """Whether the group takes no calls because it was closed, here or by its owner."""
        return self.lifecycle.state in (State.CLOSING, State.CLOSED)

    def started(self) -> None:
        """Note that all ranks are there."""
        self._counts = [0] * len(self.endpoints)
        self._handle(StartedEvent(self.epoch))

    def broken(self, cause: PhalanxError) -> None:
        """Note that the group takes no more calls, and why."""
        self._handle(BreakEvent(self.epoch, cause))

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

    def watch_setup(self, tickets: Sequence[Ticket]) -> Watch:
        """The watch over the constructors."""
        refs = [ticket.value for ticket in tickets]
        grace = self._settings.grace_s
        return Watch(self.transport, self.name, "__init__", "", range(len(refs)), self.endpoints, refs, grace)

    def settle_setup(self, watch: Watch, timeout: float) -> None:
        """Wait until every constructor has returned.

        Raises:
            WorkerInitError, WorkerDiedError, CallTimeout: one did not; the processes are for the caller to end.
        """
        try:
            watch.values(watch.started + timeout, Policy.PRIVATE)
        except NotReady:
            raise watch.timeout(timeout)[0] from None
        except FetchFailed:
            raise watch.error(init=True)[0] from None

    def not_yet(self, future: CallFuture[Any], timeout: float | None) -> CallTimeout:
        """The error for a wait that was over before another thread's wait for the same call."""
        return self.watch(future).timeout(timeout)[0]

    def all_ended(self, future: CallFuture[Any]) -> bool:
        """Whether no rank is still at it."""
        refs = [ticket.value for ticket in future.tickets]
        return not self.transport.wait(refs, len(refs), 0)[1]

    def stream(self, future: CallFuture[Any], timeout: float | None) -> Iterator[tuple[int, Any]]:
        """(rank, output) of each rank as it finishes."""
        limit = None if timeout is None else time.monotonic() + timeout
        limits = [at for at in (limit, future.deadline) if at is not None]
        watch = self.watch(future)
        try:
            yield from watch.stream(min(limits) if limits else None)
        except NotReady:
            raise self._late(future, watch, limit) from None
        except FetchFailed:
            raise self.failed(watch) from None

    def mesh(self, name: str) -> Mesh:
        """A mesh that was given to the group, or that its ranks registered (asked once per epoch).

        Raises:
            DispatchError: there is none of that name, or not every rank registered its place.
        """
        if name in self.record.meshes:
            return self.record.meshes[name]
        key = f"{self.epoch}/{name}"
        if key not in self._registered:
            self._registered[key] = self._ask_mesh(name)
        return self._registered[key]

    def forget_meshes(self) -> None:
        """Ask the ranks anew for the meshes that they registered."""
        self._registered.clear()

    def _ask_mesh(self, name: str) -> Mesh:
        from phalanx.dispatch.plan import GatherPlan

        ranks = range(self.world_size)
        plan = CallPlan(ranks=ranks, args=(), kwargs={}, gather=GatherPlan("list", ranks))
        found: dict[str, dict[int, dict[str, int]]] = {}
        for role in self.record.methods:
            answers = self.send(plan, MethodSpec(MESHES), role, None, None).result()
            for rank, registered in enumerate(answers):
                for key, coordinates in registered.items():
                    found.setdefault(key, {})[rank] = coordinates
        if name not in found:
            known = sorted({*self.record.meshes, *found})
            raise DispatchError(
                f"group {self.name!r} has no mesh {name!r} (it has: {', '.join(known) or 'none'}); pass "
                "mesh=px.Mesh(dp=..., tp=...) to px.WorkerGroup, or call self.register_mesh(name, ...) in the worker"
            )
        missing = [rank for rank in ranks if rank not in found[name]]
        if missing:
            raise DispatchError(
                f"mesh {name!r} of group {self.name!r}: ranks {missing} have not registered their place; every rank "
                "must call self.register_mesh(name, ...)"
            )
        return Mesh.from_coordinates([found[name][rank] for rank in ranks])

    def portable(self) -> Any:
        """What another process needs to call the group."""
        from phalanx.runtime.portable import pack

        return pack(self)
