"""What a group and all views of it share: endpoints, the order of calls, and the state of the group."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from phalanx.declare.bind import ClassWithInitArgs
from phalanx.declare.spec import MethodSpec
from phalanx.dispatch.plan import CallPlan, GatherPlan, Same
from phalanx.errors import CallCancelled, DispatchError
from phalanx.execution import questions
from phalanx.runtime.calls.agreement import Executed, check_order
from phalanx.runtime.calls.compose import Outlet, messages
from phalanx.runtime.calls.future import CallFuture
from phalanx.runtime.calls.settling import Settling
from phalanx.runtime.calls.store import Room
from phalanx.runtime.life.lifecycle import State
from phalanx.runtime.life.state import GroupRecord
from phalanx.runtime.session.watchman import sentinel
from phalanx.runtime.tools.trace import Traced, composing, draft_of, keep
from phalanx.topology.mesh import Mesh
from phalanx.tracing.recorder import Draft, tracing
from phalanx.transport.base import Endpoint, Ref, Ticket, Transport
from phalanx.wire.board import BARE_CALL
from phalanx.wire.messages import BARE, DESCRIBED, HALVED, HOST, OUTPUT, Message, RankCall

Methods = Mapping[str, Mapping[str, MethodSpec]]
_BARE = Message(BARE)
_MOST_DROPPED = 256


def _all_kept(plan: CallPlan) -> CallPlan:
    """The same call with the outputs of all ranks given back, for them to be compared."""
    return replace(plan, gather=replace(plan.gather, take=range(len(plan.ranks))))


class GroupCore(Settling):
    """The shared part of a group. ``owner`` is False in a view that came from another process."""

    def __init__(
        self, record: GroupRecord, transport: Transport, endpoints: list[Endpoint], owner: bool
    ) -> None:
        super().__init__(record, transport, endpoints, owner)
        room = Room(transport, _wait_for_a_call)
        self.outlet = Outlet(transport, self._settings.inline_bytes, self.book, room)
        self._order = threading.Lock()  # calls reach all ranks in one order, whichever threads make them
        self._registered: dict[str, Mesh] = {}
        self._under_way: deque[weakref.ref[CallFuture[Any]]] = deque()
        self._dropped: deque[tuple[int, Sequence[int], list[Ref]]] = deque()
        self.restarting = threading.RLock()
        #: What the workers are made of; None where another process owns the group.
        self.made_of: Mapping[str, ClassWithInitArgs] | None = None
        self.traced: Traced | None = None  # while a trace is on
        #: Brings a broken group back where a policy says so; called before a call that would fail.
        self.reviver: Callable[[], None] | None = None
        with _cores_lock:
            _cores.add(self)

    def send(
        self,
        plan: CallPlan,
        spec: MethodSpec,
        role: str,
        timeout: float | None,
        target: Any,
        *,
        describe: bool = False,
        stall_report_after: float | None = None,
        began: int = 0,
    ) -> CallFuture[Any]:
        """Send one call to its ranks; does not wait for it.

        ``describe`` asks each rank for the row count of its output beside the output, for a future that may be
        handed on by reference. ``timeout`` and ``stall_report_after`` are those of the call, where it has its own.
        ``began`` is when the caller began to plan it, for a trace.

        Raises:
            GroupClosed, GroupBroken: the group takes no calls.
            DispatchError: an argument cannot be pickled.
        """
        self._check()
        debug = self._settings.debug
        draft = None if tracing.recorder is None else draft_of(self, role, spec.name, plan, began)
        number = next(self._numbers)
        header = self._header(
            spec,
            role,
            number,
            _returns(describe, self.transport),
            "" if draft is None else keep(draft, number),
        )
        if debug and spec.replicated:
            composed = messages(self.outlet, _all_kept(plan), header, self.node_of)
        else:
            composed = messages(self.outlet, plan, header, self.node_of)
        kept = None
        with composing(draft), self._order:
            if spec.replay:
                kept = composed = list(composed)
            tickets = self._submit(plan, role, spec.name, header.returns, composed, draft)
        future = self._future(plan, tickets, spec.name, role, number, target, timeout, stall_report_after)
        future.epoch = header.epoch  # not of now: a restart may have begun meanwhile
        future.draft = draft
        future.replicated = debug and spec.replicated
        if kept is not None:
            self.replays.add(future, kept)
        self._under_way.append(weakref.ref(future))
        return future

    def send_bare(
        self,
        plan: CallPlan,
        spec: MethodSpec,
        role: str,
        timeout: float | None,
        target: Any,
        stall_report_after: float | None,
    ) -> CallFuture[Any]:
        """Send a call that needs no message; see :meth:`takes_bare`."""
        self._check()
        epoch = self.epoch
        with self._order:
            tickets = self._submit(plan, role, spec.name, OUTPUT, itertools.repeat(_BARE, len(plan.ranks)))
        future = self._future(plan, tickets, spec.name, role, BARE_CALL, target, timeout, stall_report_after)
        future.epoch = epoch
        self._under_way.append(weakref.ref(future))
        return future

    @property
    def takes_bare(self) -> bool:
        """Whether a call without arguments that keeps every output may go without a message.

        Nobody but its caller may wait for it: it has no number, by which it could be cancelled, traced or compared.
        """
        return tracing.recorder is None and not self._settings.debug

    def _check(self) -> None:
        """See to it that a call can be sent now.

        Raises:
            GroupClosed, GroupBroken: the group takes no calls.
        """
        if self.reviver is not None and self.lifecycle.state is State.BROKEN:
            self.reviver()
        self.lifecycle.check_callable()
        self._make_room()

    def _future(
        self,
        plan: CallPlan,
        tickets: list[Ticket],
        method: str,
        role: str,
        number: int,
        target: Any,
        timeout: float | None,
        stall_report_after: float | None,
    ) -> CallFuture[Any]:
        """The future of a call that was sent; a deadline of it is looked after from now on."""
        limit = timeout if timeout is not None else self.record.call_timeout
        stall = stall_report_after if stall_report_after is not None else self.record.stall_report_after
        future: CallFuture[Any] = CallFuture(self, plan, tickets, method, role, limit, target, number)
        if stall is not None:
            future.stall_report_after, future.stall_at = stall, future.started + stall
        if (stall is not None or limit is not None) and not self.transport.immediate:
            sentinel.add(self)
        return future

    def _header(self, spec: MethodSpec, role: str, number: int, returns: int, trace: str) -> RankCall:
        return RankCall(
            call=number,
            epoch=self.epoch,
            role=role,
            method=spec.name,
            keep=True,
            returns=returns,
            readonly=spec.readonly,
            to_device=spec.to_device,
            body=None,
            debug=self._settings.debug,
            trace=trace,
        )

    def _submit(
        self,
        plan: CallPlan,
        role: str,
        method: str,
        returns: int,
        composed: Iterable[Message],
        draft: Draft | None = None,
    ) -> list[Ticket]:
        submit, endpoints = self.transport.submit, self.endpoints
        tickets: list[Ticket] = []
        sent = 0
        if draft is not None:
            composed = draft.noted(composed, self.transport.immediate)
        try:
            for rank, (data, refs) in zip(plan.ranks, composed, strict=True):
                tickets.append(submit(endpoints[rank], role, method, data, refs, returns))
                sent += len(data)
        except BaseException as error:  # Ctrl-C too
            if tickets and not self.transport.immediate:
                self._half_sent(method, plan.ranks, len(tickets), error)
            raise
        self.book.called(sent)
        return tickets

    def _half_sent(self, method: str, ranks: Sequence[int], sent: int, error: BaseException) -> None:
        """Note that only some ranks got a call: they would wait for the others in the next collective."""
        text = (
            f"group {self.name!r}, {method}: ranks {list(ranks[:sent])} got the call, ranks {list(ranks[sent:])} did "
            f"not, since sending was ended by {type(error).__name__}: {error}"
        )
        self.broken(CallCancelled(text, group=self.name, method=method))

    def _make_room(self) -> None:
        """Wait for the oldest call where too many are under way; calls that nobody holds any more do not count."""
        while len(self._under_way) >= self._settings.max_in_flight:
            oldest = self._under_way.popleft()()
            if oldest is not None:
                if not oldest.ended:
                    self.transport.wait([t.value for t in oldest.tickets], len(oldest.tickets), None)
                oldest.ended = True
        if len(self._dropped) > _MOST_DROPPED:
            self._dropped_under_way()

    def dropped(self, epoch: int, plan: CallPlan, tickets: Sequence[Ticket], target: Any) -> None:
        """Note that nobody holds a call any more whose end nobody saw; may come at any time, from the collector.

        One by ``group.any`` counts until it has ended, so that calls whose futures are not kept go to all ranks in
        turn. The outputs of others are let go of at once.
        """
        if getattr(target, "_choose", False):
            self._dropped.append((epoch, plan.ranks, [ticket.value for ticket in tickets]))

    def _dropped_under_way(self) -> list[Sequence[int]]:
        """The ranks of each call by ``group.any`` that nobody holds and that has not ended; forgets the others."""
        found: list[Sequence[int]] = []
        for _ in range(len(self._dropped)):
            with contextlib.suppress(IndexError):  # another thread was faster
                epoch, ranks, refs = self._dropped.popleft()
                if epoch == self.epoch and self.transport.wait(refs, len(refs), 0)[1]:
                    self._dropped.append((epoch, ranks, refs))
                    found.append(ranks)
        return found

    def least_busy(self, ranks: Sequence[int]) -> int:
        """The rank with the fewest calls under way; the lowest of equal ones."""
        busy = Counter(itertools.chain.from_iterable(self._dropped_under_way()))
        for future in self.under_way():
            if self.all_ended(future):
                future.ended = True
            elif future.epoch == self.epoch:
                busy.update(future.plan.ranks)
        return min(ranks, key=lambda rank: (busy[rank], rank))

    def under_way(self) -> list[CallFuture[Any]]:
        """The calls that somebody holds and that nobody has seen the end of."""
        found = (reference() for reference in list(self._under_way))
        return [future for future in found if future is not None and not future.ended]

    def node_of(self, rank: int) -> str:
        """The node on which a rank is."""
        return self.endpoints[rank].facts.slot.node_id

    def busy(self) -> bool:
        """Whether a call of this process is still at work."""
        return any(not self.all_ended(future) for future in self.under_way())

    def _check_order(self, future: CallFuture[Any]) -> None:
        """In debug mode: ask the ranks in which order they ran the calls, and compare."""
        if future.method == HOST or len(future.plan.ranks) < max(2, self.world_size):
            return
        ranks = range(self.world_size)
        plan = CallPlan(
            ranks=ranks, args=(Same(questions.order),), kwargs={}, gather=GatherPlan("list", ranks)
        )
        answers = self.send(plan, MethodSpec(HOST), "", None, None).result()
        check_order(self.name, future.method, [[Executed(*call) for call in answer] for answer in answers])

    def mesh(self, name: str = "default") -> Mesh:
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

    def known_meshes(self) -> dict[str, Mesh]:
        """The meshes that were given, and those that the ranks of this epoch have told of already; asks nobody."""
        prefix = f"{self.epoch}/"
        told = {key[len(prefix) :]: mesh for key, mesh in self._registered.items() if key.startswith(prefix)}
        return {**told, **self.record.meshes}

    def forget_meshes(self) -> None:
        """Ask the ranks anew for the meshes that they registered."""
        self._registered.clear()

    def _ask_mesh(self, name: str) -> Mesh:
        ranks = range(self.world_size)
        plan = CallPlan(
            ranks=ranks, args=(Same(questions.meshes),), kwargs={}, gather=GatherPlan("list", ranks)
        )
        found: dict[str, dict[int, dict[str, int]]] = {}
        for role in self.record.methods:
            answers = self.send(plan, MethodSpec(HOST), role, None, None).result()
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


#: All groups of this process: a call that finds the store full waits for what fills it, and how results are stored
#: depends on whether all ranks can read them where they lie.
_cores: weakref.WeakSet[GroupCore] = weakref.WeakSet()
_cores_lock = threading.Lock()


def _returns(describe: bool, transport: Transport) -> int:
    """What the ranks give back of an output that may be handed on; in halves where ranks lie on several nodes."""
    if not describe:
        return OUTPUT
    with _cores_lock:
        open_ones = [core for core in _cores if core.transport is transport and not core.closed]
    nodes = {endpoint.facts.slot.node_id for core in open_ones for endpoint in core.endpoints}
    return HALVED if len(nodes) > 1 else DESCRIBED


def _wait_for_a_call(seconds: float) -> bool:
    """Wait for a rank to end a call, of any group of this process; False if there is none under way."""
    with _cores_lock:
        cores = list(_cores)
    for core in cores:
        refs = [ticket.value for future in core.under_way() for ticket in future.tickets]
        pending = core.transport.wait(refs, len(refs), 0)[1] if refs else []
        if pending:
            core.transport.wait([refs[position] for position in pending], 1, seconds)
            return True
    return False
