"""What a group and all views of it share: endpoints, the order of calls, and the state of the group."""

from __future__ import annotations

import itertools
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.collect.failures import combine
from phalanx.config import settings
from phalanx.declare.spec import MethodSpec
from phalanx.dispatch.plan import CallPlan, GatherPlan
from phalanx.errors import (
    CallTimeout,
    DispatchError,
    GroupClosed,
    PhalanxError,
    StaleEpoch,
    WorkerDiedError,
)
from phalanx.runtime.counts import Book, process
from phalanx.runtime.future import CallFuture
from phalanx.runtime.lifecycle import (
    BreakEvent,
    ClosedEvent,
    CloseEvent,
    Event,
    Lifecycle,
    RestartEvent,
    StartedEvent,
    State,
)
from phalanx.runtime.replay import Replays
from phalanx.runtime.room import Room
from phalanx.runtime.sender import Outlet, messages
from phalanx.runtime.sentinel import sentinel
from phalanx.runtime.spmd import Executed, check_order
from phalanx.runtime.supervisor import FetchFailed, NotReady, Watch, settled_value
from phalanx.topology.mesh import Mesh
from phalanx.transport.base import Endpoint, Ticket, Transport
from phalanx.wire.board import BARE_CALL, SETUP_CALL
from phalanx.wire.codec import Policy
from phalanx.wire.messages import BARE, CLOSE, MESHES, ORDER, Message, RankCall

Methods = Mapping[str, Mapping[str, MethodSpec]]
_SEVERED_WITHIN_S = 0.5
_CANCELLED_WITHIN_S = 10.0
_FIRST_NUMBER = 1 << 16
_BARE = Message(BARE)


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


def _all_kept(plan: CallPlan) -> CallPlan:
    """The same call with the outputs of all ranks given back, for them to be compared."""
    return replace(plan, gather=replace(plan.gather, take=range(len(plan.ranks))))


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
        self._settings = settings()
        self.book = Book(process)
        room = Room(transport, _wait_for_a_call)
        self.outlet = Outlet(transport, self._settings.inline_bytes, self.book, room)
        self._life = threading.RLock()
        self._order = threading.Lock()  # calls reach all ranks in one order, whichever threads make them
        # Not from 1: several processes may call one group, and its ranks tell the calls apart by number.
        self._numbers = itertools.count(secrets.randbits(40) * _FIRST_NUMBER + _FIRST_NUMBER)
        self._registered: dict[str, Mesh] = {}
        self._under_way: deque[weakref.ref[CallFuture[Any]]] = deque()
        self._counts = [0] * len(endpoints)
        self._stopped: set[int] = set()  # ranks of this epoch
        self.replays = Replays()
        self.restarting = threading.RLock()
        #: Brings a broken group back where a policy says so; called before a call that would fail.
        self.reviver: Callable[[], None] | None = None

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
        bare: bool = False,
        stall_report_after: float | None = None,
    ) -> CallFuture[Any]:
        """Send one call to its ranks; does not wait for it.

        ``describe`` asks each rank for the row count of its output beside the output, for a future that may be
        handed on by reference. ``bare`` says that nobody but the caller waits for this call, which has no arguments
        and keeps every output: it then goes without a message. ``timeout`` and ``stall_report_after`` are those of
        the call, where it has its own.

        Raises:
            GroupClosed, GroupBroken: the group takes no calls.
            DispatchError: an argument cannot be pickled.
        """
        if self.reviver is not None and self.lifecycle.state is State.BROKEN:
            self.reviver()
        self.lifecycle.check_callable()
        self._make_room()
        debug = self._settings.debug
        bare = bare and not debug  # the ranks tell calls apart by number
        bare = bare and not self._settings.debug  # the checks of debug mode look at messages
        number = BARE_CALL if bare else next(self._numbers)
        header = RankCall(
            call=number,
            epoch=self.epoch,
            role=role,
            method=spec.name,
            keep=True,
            describe=describe,
            readonly=spec.readonly,
            to_device=spec.to_device,
            body=None,
            debug=debug,
        )
        limit = timeout if timeout is not None else self.record.call_timeout
        stall = stall_report_after if stall_report_after is not None else self.record.stall_report_after
        composed: Iterable[Message] = (
            [_BARE] * len(plan.ranks)
            if bare
            else messages(self.outlet, _all_kept(plan) if debug and spec.replicated else plan, header)
        )
        kept = composed = list(composed) if spec.replay else composed
        with self._order:
            tickets = self._submit(plan, header, composed)
        future: CallFuture[Any] = CallFuture(self, plan, tickets, spec.name, role, limit, target, number)
        future.replicated = debug and spec.replicated
        if stall is not None:
            future.stall_report_after, future.stall_at = stall, future.started + stall
        if (stall is not None or limit is not None) and not self.transport.immediate:
            sentinel.add(self)
        if spec.replay and isinstance(kept, list):
            self.replays.add(future, kept)
        for rank in plan.ranks:
            self._counts[rank] += 1
        self._under_way.append(weakref.ref(future))
        return future

    def _submit(self, plan: CallPlan, header: RankCall, composed: Iterable[Message]) -> list[Ticket]:
        submit, endpoints = self.transport.submit, self.endpoints
        tickets: list[Ticket] = []
        sent = 0
        for rank, (data, refs) in zip(plan.ranks, composed, strict=True):
            tickets.append(submit(endpoints[rank], header.role, header.method, data, refs, header.describe))
            sent += len(data)
        self.book.called(sent)
        return tickets

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
            if future.epoch != self.epoch:
                return
            for rank in future.plan.ranks:
                self._counts[rank] -= 1

    def least_busy(self, ranks: Sequence[int]) -> int:
        """The rank with the fewest calls under way; the lowest of equal ones."""
        for reference in list(self._under_way):
            future = reference()
            if future is not None and not future.counted_out and self.all_ended(future):
                self.ended(future)
        return min(ranks, key=lambda rank: (self._counts[rank], rank))

    def under_way(self) -> list[CallFuture[Any]]:
        """The calls that somebody holds and that nobody has seen the end of."""
        found = (reference() for reference in list(self._under_way))
        return [future for future in found if future is not None and not future.counted_out]

    def busy(self) -> bool:
        """Whether a call of this process is still at work."""
        return any(not self.all_ended(future) for future in self.under_way())

    def watch(self, future: CallFuture[Any]) -> Watch:
        """The watch over a call."""
        return Watch(
            self.transport,
            self.name,
            future.method,
            future.role,
            future.plan.ranks,
            [self.endpoints[rank] for rank in future.plan.ranks],
            [ticket.value for ticket in future.tickets],
            self._settings.grace_s,
            call=future.number,
            owner=self.owner,
            started=future.started,
            meter=self.book.arrived,
        )

    def settle(self, future: CallFuture[Any], limit: float | None) -> Any:
        """Wait for a call and give its value, or raise its one error."""
        self._check_epoch(future)
        if future.cancel_error is not None:
            raise future.cancel_error
        watch = self.watch(future)
        limits = [at for at in (limit, future.deadline) if at is not None]
        until = min(limits) if limits else None
        while True:
            try:
                value = settled_value(future, watch, until, future.target)
                if self._settings.debug:
                    self._check_order(future)
                return value
            except NotReady:
                error = self._late(future, watch, limit)
                until = None  # without an error it has ended by now
            except FetchFailed:
                error = self.failed(watch, future)
            if error is not None:
                raise error from None

    def _check_order(self, future: CallFuture[Any]) -> None:
        """In debug mode: ask the ranks in which order they ran the calls, and compare."""
        if future.method in (ORDER, CLOSE) or len(future.plan.ranks) < max(2, self.world_size):
            return
        ranks = range(self.world_size)
        plan = CallPlan(ranks=ranks, args=(), kwargs={}, gather=GatherPlan("list", ranks))
        answers = self.send(plan, MethodSpec(ORDER), "", None, None).result()
        check_order(self.name, future.method, [[Executed(*call) for call in answer] for answer in answers])

    def _check_epoch(self, future: CallFuture[Any]) -> None:
        if future.epoch != self.epoch:
            raise StaleEpoch(
                f"group {self.name!r} was restarted: this call of {future.method} belongs to epoch {future.epoch}, the "
                f"group is in epoch {self.epoch}; make the call again",
                group=self.name,
                epoch=future.epoch,
                current=self.epoch,
            )

    def _late(self, future: CallFuture[Any], watch: Watch, limit: float | None) -> CallTimeout | None:
        if future.deadline is None or (limit is not None and limit < future.deadline):
            waited = (self.now() if limit is None else limit) - watch.started
            late = watch.timeout(round(max(0.0, waited), 3))
            return late[0] if late else None
        late = watch.timeout(future.timeout)
        if late is None:
            return None
        future.expired = True
        self._stop(late[1], watch)
        self.broken(late[0], future.epoch)
        return late[0]

    def failed(self, watch: Watch, future: CallFuture[Any]) -> PhalanxError:
        """The one error of a call of which a rank failed; breaks the group where a rank is lost or still busy."""
        self._check_epoch(future)
        if future.cancelling is not None:
            future.cancelling.wait(_CANCELLED_WITHIN_S)
        if future.cancel_error is not None:
            return future.cancel_error
        if self.closed:
            return GroupClosed(f"group {self.name!r} was closed before {watch.method} ended", group=self.name)
        if not self._stopped.isdisjoint(future.plan.ranks):
            return self.lifecycle.broken_error()  # it went down with another call, which has the cause
        error, pending, died = watch.error()
        self._check_epoch(future)
        if self.closed:
            return GroupClosed(f"group {self.name!r} was closed before {watch.method} ended", group=self.name)
        self.book.failed()
        self._stop(pending, watch)
        if isinstance(error, GroupClosed):
            self.begin_close()
            self.finish_close()
        elif pending or died:
            self.broken(error, future.epoch)
        return error

    def cancel(self, future: CallFuture[Any]) -> bool:
        """End a call: what has not begun is dropped, what runs is interrupted, what does not yield is stopped.

        Returns whether the call was cancelled; False if every rank returned first. The group stays ready where
        every rank ended its part by itself within the grace, and is broken otherwise.
        """
        self._check_epoch(future)
        watch = self.watch(future)
        pending = self.transport.wait(watch.refs, len(watch.refs), 0)[1]
        if not pending:
            return False
        drops = self.transport.cancel([watch.endpoints[p] for p in pending], future.number)
        dropped = [p for p, drop in zip(pending, drops, strict=True) if drop]
        running = [p for p in pending if p not in dropped]
        pending = self._still_at_it(watch, running, self._settings.grace_s)
        severed = bool(pending)
        if severed:  # perhaps in a collective, which nothing else ends
            self.transport.sever([watch.endpoints[p] for p in pending])
            pending = self._still_at_it(watch, running, _SEVERED_WITHIN_S)
        error = watch.cancelled(dropped, pending)
        self._stop(pending, watch)
        if error is None:
            return False
        if severed or any(report.kind == "died" for report in error.failures):
            self.broken(error, future.epoch)
        future.cancel_error = error
        return True

    def _still_at_it(self, watch: Watch, positions: Sequence[int], seconds: float) -> list[int]:
        """Of some positions those that have not ended after a while."""
        if not positions:
            return []
        refs = [watch.refs[position] for position in positions]
        return [positions[index] for index in self.transport.wait(refs, len(refs), seconds)[1]]

    def has_dead(self) -> bool:
        """Whether a rank of a group that is ready is known to be gone; cheap."""
        if self.lifecycle.state is not State.READY or not self.owner:
            return False
        return not all(map(self.transport.alive, self.endpoints))

    def touches_dead(self, future: CallFuture[Any]) -> bool:
        """Whether a call failed on a rank because that is gone; one that had returned before did not."""
        if future.epoch != self.epoch:
            return False
        for rank, ticket in zip(future.plan.ranks, future.tickets, strict=True):
            if not self.transport.alive(self.endpoints[rank]):
                ended = self.transport.wait([ticket.value], 1, 0)[0]
                if not ended or not self.transport.outcome(ticket.value).ok:
                    return True
        return False

    def lost(self) -> None:
        """Look whether a rank died while nobody called it, and break the group if so."""
        if not self.has_dead():
            return
        epoch = self.epoch
        dead = [rank for rank, endpoint in enumerate(self.endpoints) if not self.transport.alive(endpoint)]
        if not dead:
            return
        watch = Watch(
            self.transport, self.name, "(between calls)", "", range(self.world_size), self.endpoints, (), 0.0
        )
        at = self.now()
        reports = [
            replace(watch.dead(rank, self.transport.post_mortem(self.endpoints[rank], None)), at=at)
            for rank in dead
        ]
        error = combine(self.name, watch.method, reports)
        if isinstance(error, WorkerDiedError) and not self.closed:
            self.broken(error, epoch)

    def _stop(self, positions: Sequence[int], watch: Watch) -> None:
        """Stop ranks that do not end by themselves. Whoever calls breaks the group, so no call follows."""
        if positions:
            self._stopped.update(watch.ranks[position] for position in positions)
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

    def now(self) -> float:
        """Seconds on the clock by which the backend waits."""
        return self.transport.now()

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
        ranks = range(len(refs))
        return Watch(
            self.transport,
            self.name,
            "__init__",
            "",
            ranks,
            self.endpoints,
            refs,
            self._settings.grace_s,
            call=SETUP_CALL,
        )

    def settle_setup(self, watch: Watch, timeout: float) -> None:
        """Wait until every constructor has returned.

        Raises:
            WorkerInitError, WorkerDiedError, CallTimeout: one did not; the processes are for the caller to end.
        """
        limit: float | None = watch.started + timeout
        while True:
            try:
                watch.values(limit, Policy.PRIVATE)
                return
            except NotReady:
                late = watch.timeout(timeout, init=True)
                limit = None  # all have returned by now, or there is an error
                if late is not None:
                    raise late[0] from None
            except FetchFailed:
                raise watch.error(init=True)[0] from None

    def replay(self, timeout: float) -> None:
        """Make the calls that are marked for it again, on the ranks of this epoch, one after another.

        Raises:
            RemoteCallError, WorkerDiedError, CallTimeout: one of them failed.
        """
        for entry in self.replays.to_make():
            number = next(self._numbers)
            tickets = [
                self.transport.submit(
                    self.endpoints[rank], entry.role, entry.method, message.data, message.refs, False
                )
                for rank, message in entry.messages(number, self.epoch)
            ]
            watch = Watch(
                self.transport,
                self.name,
                entry.method,
                entry.role,
                entry.ranks,
                [self.endpoints[rank] for rank in entry.ranks],
                [ticket.value for ticket in tickets],
                self._settings.grace_s,
                call=number,
            )
            try:
                watch.values(watch.started + timeout, Policy.VIEW)
            except NotReady:
                late = watch.timeout(timeout)
                if late is not None:
                    raise late[0] from None
            except FetchFailed:
                raise watch.error()[0] from None

    def not_yet(self, future: CallFuture[Any], timeout: float | None) -> CallTimeout:
        """The error for a wait that was over before another thread's wait for the same call."""
        late = self.watch(future).timeout(timeout)
        if late is not None:
            return late[0]
        text = (
            f"group {self.name!r}, {future.method}: another thread is fetching the result just now; ask again"
        )
        return CallTimeout(text, group=self.name, method=future.method, timeout=timeout)

    def all_ended(self, future: CallFuture[Any]) -> bool:
        """Whether no rank is still at it."""
        refs = [ticket.value for ticket in future.tickets]
        return not self.transport.wait(refs, len(refs), 0)[1]

    def stream(self, future: CallFuture[Any], timeout: float | None) -> Iterator[tuple[int, Any]]:
        """(rank, output) of each rank as it finishes."""
        self._check_epoch(future)
        limit = None if timeout is None else self.now() + timeout
        limits = [at for at in (limit, future.deadline) if at is not None]
        watch = self.watch(future)
        given: set[int] = set()
        until = min(limits) if limits else None
        while True:
            try:
                for rank, output in watch.stream(until):
                    if rank not in given:
                        given.add(rank)
                        yield rank, output
                return
            except NotReady:
                error, until = self._late(future, watch, limit), None
            except FetchFailed:
                error = self.failed(watch, future)
            if error is not None:
                raise error from None

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


#: All groups of this process, so that a call that finds the store full can wait for what fills it.
_cores: weakref.WeakSet[GroupCore] = weakref.WeakSet()


def _wait_for_a_call(seconds: float) -> bool:
    """Wait for a rank to end a call, of any group of this process; False if there is none under way."""
    for core in list(_cores):
        refs = [ticket.value for future in core.under_way() for ticket in future.tickets]
        pending = core.transport.wait(refs, len(refs), 0)[1] if refs else []
        if pending:
            core.transport.wait([refs[position] for position in pending], 1, seconds)
            return True
    return False
