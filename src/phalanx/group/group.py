"""What a group and all views of it share: its life, and the way on which its calls are sent."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import Endpoint
from phalanx.calls.call import Call
from phalanx.calls.compose import Outlet, messages
from phalanx.calls.counts import Book, CallMeter, process
from phalanx.calls.divergence_check import Executed, check_order, check_replicated
from phalanx.calls.health_check import look_after
from phalanx.calls.in_flight import InFlightCalls
from phalanx.calls.listeners import Listeners, everywhere
from phalanx.calls.request import CallRequest
from phalanx.calls.restart_reruns import RerunLog
from phalanx.calls.rules import CallRules
from phalanx.calls.store_quota import Room
from phalanx.calls.streams import Streaming
from phalanx.calls.submitter import DirectSubmitter, Outgoing, Submitter
from phalanx.collect.message import rank_list
from phalanx.config import settings
from phalanx.declare.spec import MethodSpec
from phalanx.dispatch.plan import CallPlan, GatherPlan, Same
from phalanx.display.metric_buffer import meters
from phalanx.errors import CallCancelled
from phalanx.group.epoch import Epoch, GroupCard, GroupState
from phalanx.group.lifecycle import Lifecycle, State
from phalanx.group.live_groups import open_groups
from phalanx.group.membership_refresh import MembershipCache
from phalanx.group.owner_handle import OwnerHandle, Resync
from phalanx.members.meshes import mesh_of
from phalanx.session.monitor import monitor
from phalanx.topology.mesh import Mesh
from phalanx.wire.call_page import BARE_CALLS
from phalanx.wire.messages import ANY_EPOCH, BARE, DESCRIBED, HOST, OUTPUT, Message, RankCall, titled
from phalanx.worker import handlers as questions

_BARE = Message(BARE)
_FIRST_NUMBER = 1 << 16

everywhere.add(CallMeter())


class Group:
    """The shared part of a group. ``owner`` is False in a view that came from another process.

    A call takes its epoch when it is made and keeps it; it goes to ranks by ``door``, all ranks seeing the calls of all
    threads in one order.
    """

    def __init__(
        self, card: GroupCard, transport: Backend, size: int, *, owner: bool, number: int = 0
    ) -> None:
        self.life = GroupState(card, transport, size, owner=owner, number=number)
        self.book = Book(process)
        self.listeners = Listeners(everywhere)
        self.under_way = InFlightCalls()
        self._recent = self.under_way.recent
        self._most_under_way = settings().max_in_flight
        self.repeats = RerunLog()
        self.listeners.add(self.book)
        self._listeners_of_chosen = Listeners(self.listeners)
        self._listeners_of_chosen.add(self.under_way)
        self.door: Submitter = DirectSubmitter(transport)
        #: Of a view elsewhere: what it knows of the roster.
        self.follower: MembershipCache | None = None
        #: Where views elsewhere find the newest roster; "" where the group never travelled, or is detached.
        self.roster_key = ""
        room = Room(transport, open_groups.wait_for_a_call)
        self.outlet = Outlet(transport, settings().inline_bytes, self.book, room)
        self.debug = settings().debug
        self.rules = CallRules(settings().grace_s, self.book.arrived_bytes)
        #: Held while a call goes to its ranks; whoever holds it sends several that nobody comes between.
        self.order = threading.RLock()
        # Not from 1: several processes may call one group, and its ranks tell the calls apart by number.
        self._numbers = itertools.count(secrets.randbits(40) * _FIRST_NUMBER + _FIRST_NUMBER)
        #: Held while members of the group change.
        self.restarting = threading.RLock()
        #: Whether whoever holds that calls the group as it is.
        self.unmended = False
        #: None where another process owns the group.
        self.owned: OwnerHandle | None = None
        #: What brings weights to ranks that are new, before they get calls.
        self.weights_by: weakref.WeakSet[Resync] = weakref.WeakSet()
        self._preparing: int | None = None
        if not transport.immediate:
            meters.watch(card.name, self.book.counts)
        open_groups.add(self)

    @property
    def name(self) -> str:
        return self.life.name

    @property
    def card(self) -> GroupCard:
        return self.life.card

    @property
    def transport(self) -> Backend:
        return self.life.transport

    @property
    def lifecycle(self) -> Lifecycle:
        return self.life.lifecycle

    @property
    def epoch(self) -> Epoch:
        """Who the ranks are now."""
        return self.life.epoch

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The processes that are the ranks now; empty while they are being started."""
        return self.life.epoch.endpoints

    @property
    def world_size(self) -> int:
        return self.life.epoch.size

    @property
    def closed(self) -> bool:
        """Whether the group takes no calls because it was closed, here or by its owner."""
        return self.life.closed

    def new_number(self) -> int:
        """A number for a call."""
        return next(self._numbers)

    def send(self, request: CallRequest) -> Call:
        """Send one call to its ranks; does not wait for it.

        Raises:
            GroupClosed, GroupBroken: the group takes no calls.
            StaleEpoch: it was restarted while the call was being made; nothing was sent.
            DispatchError: an argument cannot be pickled.
        """
        epoch = self.check()
        plan, spec, streaming = request.plan, request.spec, request.streaming
        if self.card.independent or self.follower is not None:
            self._check_there(epoch, request)
        call = self.call(epoch, request, spec.title or spec.name, self.new_number())
        heard = call.heard
        if heard.planned:
            call.tell(heard.planned)
        sent_plan = plan
        if self.debug:
            call.rules = replace(self.rules, verify=None if streaming else self._verifier(spec))
            sent_plan = _all_kept(plan) if spec.replicated and streaming is None else plan
        header = self._header(call, spec, DESCRIBED if request.describe else OUTPUT)
        composed: Iterable[Message] = messages(self.outlet.of(call), sent_plan, header)
        if heard.composed or heard.posted:
            composed = self._told(call, composed)
        if spec.rerun_on_restart:
            composed = self._repeated(call, composed)
        self._submit(call, composed, header.returns, spec.name, streaming)
        call.plan = plan.without_arguments()  # which may be large, and live no longer than the caller wants
        if request.chosen:
            self.under_way.add_chosen(call)
        if streaming is not None and streaming.buffer is not None:
            self.under_way.add_stream(call)
        self._recent.append(weakref.ref(call))
        return call

    def send_bare(self, request: CallRequest) -> Call:
        """Send a call that needs no message; see :meth:`takes_bare`."""
        epoch = self.check()
        if self.card.independent:
            self._check_there(epoch, request)
        call = self.call(epoch, request, request.spec.name, BARE_CALLS)
        self._submit(call, itertools.repeat(_BARE, len(request.plan.ranks)), OUTPUT, request.spec.name)
        self._recent.append(weakref.ref(call))
        return call

    def _check_there(self, epoch: Epoch, request: CallRequest) -> None:
        """See to it that the ranks of a call, planned a moment ago, are still there.

        Raises:
            StaleEpoch: one of them leaves, or has left.
        """
        there = len(epoch.endpoints) if request.spec.name == HOST else epoch.size
        if any(rank >= there for rank in request.plan.ranks):
            raise self.lifecycle.stale_error(epoch.number, request.spec.name)

    def began(self) -> int:
        """Return the time at which planning of a call begins, in ns since 1970; 0 if no listener needs it."""
        self.ensure_ready()
        return time.time_ns() if self.listeners.heard.planned else 0

    @property
    def takes_bare(self) -> bool:
        """Whether a call without arguments that keeps every output may go without a message.

        Its number is then the one to which the sender and each rank count such calls, so there must be one sender; and
        it can be neither traced nor compared.
        """
        return self.life.owner and not self.debug and not self.listeners.heard.planned

    def ensure_ready(self) -> None:
        """Recover a broken group, or move its ranks off draining nodes, if the group's policy says so.

        Called before a call is planned, and never by a thread that holds ``order`` or the lock of a sync.
        """
        if self.follower is not None:
            self.follower.look()
        if len(self._recent) >= self._most_under_way:
            self.under_way.make_room(self._most_under_way)  # may take long, and the group may break: first
        if self.life.lifecycle.state is State.BROKEN or self.life.notices.urgent:
            self._mend()

    def check(self) -> Epoch:
        """Return the epoch to which a call can be sent now.

        Raises:
            GroupClosed, GroupBroken: the group takes no calls.
        """
        lifecycle = self.life.lifecycle
        epoch = self.life.epoch  # before the state: one that has no processes yet is then not taken
        if lifecycle.state is not State.READY and not self._prepared_here():
            lifecycle.check_callable()
        return epoch

    @contextlib.contextmanager
    def preparing(self) -> Generator[None]:
        """The time in which this thread calls ranks that are there, before the group takes the calls of others."""
        self._preparing = threading.get_ident()
        try:
            yield
        finally:
            self._preparing = None

    def _prepared_here(self) -> bool:
        return self._preparing == threading.get_ident() and self.lifecycle.state is State.RESTARTING

    def _mend(self) -> None:
        if self.owned is not None and self.owned.revive is not None:
            self.owned.revive()
        else:
            self.life.notices.urgent = False

    @contextlib.contextmanager
    def as_it_is(self) -> Generator[None]:
        """The time in which members change by this thread alone, whose calls do not have the group mended or moved."""
        with self.restarting:
            before, self.unmended = self.unmended, True
            try:
                yield
            finally:
                self.unmended = before

    def call(self, epoch: Epoch, request: CallRequest, method: str, number: int) -> Call:
        """A call of that epoch that is about to be sent; a deadline of it is looked after from now on."""
        card = self.life.card
        limit = request.timeout if request.timeout is not None else card.call_timeout
        stall = (
            request.stall_report_after if request.stall_report_after is not None else card.stall_report_after
        )
        if (stall is not None or limit is not None) and not self.life.transport.immediate:
            monitor.add(self)
        return Call(
            self.life,
            epoch,
            request.plan,
            request.role,
            method,
            number,
            self.rules,
            self._listeners_of_chosen if request.chosen else self.listeners,
            limit=limit,
            stall_after=stall,
            collector=request.collector,
            began=request.began,
        )

    def _header(self, call: Call, spec: MethodSpec, returns: int) -> RankCall:
        return RankCall(
            call=call.number,
            epoch=self._epoch_told(call),
            role=call.role,
            method=titled(spec.title) if spec.title else spec.name,
            keep=True,
            returns=returns,
            readonly=spec.readonly,
            to_device=spec.to_device,
            body=None,
            debug=self.debug,
            trace=call.trace,
        )

    def _epoch_told(self, call: Call) -> int:
        """The epoch of which the ranks of a call are to be; a view of another process does not know its owner's."""
        if self.follower is not None:
            return call.epoch.number  # ranks that know of a newer roster refuse it
        together = not self.card.independent and len(call.plan.ranks) == call.epoch.size
        return call.epoch.number if self.life.owner and together else ANY_EPOCH

    def _told(self, call: Call, composed: Iterable[Message]) -> Iterator[Message]:
        for message in composed:
            call.tell(call.heard.composed, message)
            yield message
            call.tell(call.heard.posted)

    def _repeated(self, call: Call, composed: Iterable[Message]) -> Iterator[Message]:
        """The messages, which a restart sends again."""
        sent = list(composed)
        self.listeners.add(self.repeats)
        call.heard = call.listeners.heard
        yield from sent
        self.repeats.add(call, sent)

    def _submit(
        self,
        call: Call,
        composed: Iterable[Message],
        returns: int,
        method: str,
        streaming: Streaming | None = None,
    ) -> None:
        ranks = call.plan.ranks
        outgoing = Outgoing(call.role, method, ranks, composed, returns, streaming=streaming)
        try:
            with self.order:  # calls reach all ranks in one order, whichever threads make them
                if self.life.epoch is not call.epoch and not self.life.epoch.takes(ranks, call.epoch):
                    raise self.lifecycle.stale_error(call.epoch.number, call.method)
                call.arrivals = self.door.submit(call.epoch, outgoing)
                if call.number == BARE_CALLS:
                    endpoints = call.epoch.endpoints
                    call.numbers = [BARE_CALLS + endpoints[rank].bare_calls for rank in call.plan.ranks]
        except BaseException as error:  # Ctrl-C too
            if outgoing.reached and not self.life.transport.immediate:
                self._half_sent(call, outgoing.reached, error)
            call.tell_end(error)
            raise
        call.was_sent = True
        call.tell(call.heard.sent, outgoing.nbytes)

    def _half_sent(self, call: Call, reached: Sequence[int], error: BaseException) -> None:
        """Note that only some ranks got a call: they would wait for the others in the next collective."""
        got = {call.plan.ranks[position] for position in reached}
        text = (
            f"group {self.name!r}, {call.method}: {rank_list(got)} got the call, "
            f"{rank_list(set(call.plan.ranks) - got)} did not: sending was ended by {type(error).__name__}: {error}"
        )
        self.life.broken(CallCancelled(text, group=self.name, method=call.method), call.epoch)

    def _verifier(self, spec: MethodSpec) -> Callable[[Call, Sequence[Any]], None]:
        """What debug mode does before the outputs of a call are joined: compare what the ranks did."""

        def verify(call: Call, outputs: Sequence[Any]) -> None:
            if spec.replicated:
                check_replicated(self.name, call.method, call.plan.ranks, outputs)
            if spec.name != HOST and len(call.plan.ranks) >= max(2, self.world_size):
                orders = self._told_by_ranks(questions.order, "")
                check_order(self.name, call.method, [[Executed(*one) for one in order] for order in orders])

        return verify

    def _told_by_ranks(self, function: Callable[..., Any], role: str) -> list[Any]:
        """What a function of the library, run on every rank, gives there; waits for the calls before it."""
        ranks = range(self.world_size)
        plan = CallPlan(ranks, (Same(function),), {}, GatherPlan("list", ranks))
        return self.send(CallRequest(plan, MethodSpec(HOST), role)).result(None)

    def mesh(self, name: str = "default") -> Mesh:
        """A mesh that was given to the group, or that its ranks registered (asked once per epoch).

        Raises:
            DispatchError: there is none of that name, or not every rank registered its place.
        """
        return mesh_of(self.life, name, lambda role: self._told_by_ranks(questions.meshes, role))

    def known_meshes(self) -> dict[str, Mesh]:
        """The meshes that were given, and those that the ranks of this epoch have told of already; asks nobody."""
        return {**self.life.epoch.meshes, **{name: self.mesh(name) for name in self.card.meshes}}

    def forget_meshes(self) -> None:
        """Ask the ranks anew for the meshes that they registered."""
        self.life.epoch.meshes.clear()

    def least_busy(self, sets: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The set of ranks with the fewest calls under way; the first of equal ones."""
        return self.under_way.least_busy(self.life.epoch, sets)

    def loads(self) -> dict[int, int]:
        """How many calls are under way on each rank that lives."""
        epoch = self.life.epoch
        dead, busy = epoch.dead(self.transport), self.under_way.loads(epoch)
        return {rank: busy[rank] for rank in range(epoch.size) if rank not in dead}

    def look(self) -> None:
        """What the monitor does for a group: end calls whose deadline is over, report stalls, find lost ranks."""
        look_after(self.life, self.under_way)


def _all_kept(plan: CallPlan) -> CallPlan:
    """The same call with the outputs of all ranks given back, for them to be compared."""
    return replace(plan, gather=replace(plan.gather, take=range(len(plan.ranks))))
