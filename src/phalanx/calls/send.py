"""Sending of calls to the ranks of a group. Ranks receive the calls of all threads in the same order.

If a rank refuses a call of a view in another process, a call of this rank alone is sent again, by the newest roster.
A refused call of several ranks raises StaleEpoch instead: ranks that died may have begun the call.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, cast

from phalanx.backends.backend_types import RankStream, ResultHandle
from phalanx.calls import health_check
from phalanx.calls.call import Call
from phalanx.calls.call_state import SILENT, CallInfo, PendingStream, Results, Streaming, listening
from phalanx.calls.compose import messages
from phalanx.calls.divergence_check import check_order, check_replicated
from phalanx.collect.message import rank_list
from phalanx.declare.register import MethodSpec
from phalanx.dispatch.plan import CallPlan, GatherPlan, Same, Target
from phalanx.errors import CallCancelled
from phalanx.group.epoch import Epoch
from phalanx.group.group import Group
from phalanx.group.roster import was_refused
from phalanx.wire.messages import ANY_EPOCH, DESCRIBED, LIBRARY, OUTPUT, Message, RankCall, titled
from phalanx.worker import handlers

_MOST_REPEATS = 20


@dataclass(frozen=True)
class CallOptions:
    """Options of a call: seconds until it ends with an error, and until its state is logged; None: as for the group."""

    timeout: float | None = None
    stall_report_after: float | None = None


NO_OPTIONS = CallOptions()


def send(
    core: Group,
    plan: CallPlan,
    spec: MethodSpec,
    role: str,
    *,
    collector: Target | None = None,
    options: CallOptions = NO_OPTIONS,
    describe: bool = False,
    chosen: bool = False,
    streaming: Streaming | None = None,
    began: int = 0,
) -> Call:
    """Send a call to its ranks, without waiting for its outputs.

    May wait for capacity in the object store, and for futures among the arguments that only this process can join.

    Args:
        core: the group.
        plan: ranks and arguments of the call.
        spec: the declaration of its method.
        role: the method's role.
        collector: passed to a custom collect function as the group.
        options: its deadline, and the time of the report of a stall.
        describe: ask each rank for the row count of its output, for a future that may be passed on by reference.
        chosen: its ranks were chosen as the least busy.
        streaming: options of the streams; None: no rank streams.
        began: start of the planning, as returned by :func:`planning_began`.

    Raises:
        GroupClosed, GroupBroken: if the group takes no calls.
        StaleEpoch: if ranks were replaced while the call was being made; nothing was sent.
        DispatchError: if an argument cannot be pickled, or the object store cannot hold it.
    """
    epoch = core.check()
    if core.handle.independent or core.is_view:
        _check_there(core, epoch, plan, spec)
    method = spec.title or spec.name
    call = new_call(core, epoch, plan, role, method, collector=collector, options=options, began=began)
    call.listener.planned(call)
    sent_plan = plan
    if core.debug:
        call.verify = None if streaming else partial(_verify, spec)
        # The outputs of all ranks are returned, to be compared.
        if spec.replicated and streaming is None and plan.gather.collect != "none":
            sent_plan = replace(plan, gather=replace(plan.gather, take=range(len(plan.ranks))))
    header = _header(core, call, spec, DESCRIBED if describe else OUTPUT)
    composed: Iterable[Message] = messages(core, sent_plan, header, call)
    if spec.rerun_on_restart:
        composed = _noted(call, composed)
    _submit(core, call, composed, header.returns, streaming)
    call.plan = plan.without_arguments()  # the arguments may be large: the call does not keep them alive
    if chosen:
        core.chosen.add(call)
    core.recent[call.number] = call  # from now on, other threads see the call and can end it
    return call


def planning_began() -> int:
    """Return the current time, as the start of the planning of a call, in ns since 1970; 0 if no trace is on."""
    return time.time_ns() if listening.current is not SILENT else 0


def new_call(
    core: Group,
    epoch: Epoch,
    plan: CallPlan,
    role: str,
    method: str,
    *,
    collector: Target | None = None,
    options: CallOptions = NO_OPTIONS,
    began: int = 0,
) -> Call:
    """Create a call that is about to be sent to ranks of ``epoch``. The monitor checks its deadline from now on."""
    limit = core.handle.call_timeout if options.timeout is None else options.timeout
    stall = options.stall_report_after
    stall = core.handle.stall_report_after if stall is None else stall
    if (stall is not None or limit is not None) and not core.backend.immediate:
        health_check.checks.begin()
    return Call(
        core,
        epoch,
        plan,
        role,
        method,
        core.new_number(),
        listening.current,
        limit=limit,
        stall_after=stall,
        collector=collector,
        began=began,
    )


def _submit(
    core: Group, call: Call, composed: Iterable[Message], returns: int, streaming: Streaming | None
) -> None:
    """Submit the messages of a call to its ranks; they are encoded lazily."""
    backend, endpoints, ranks = core.backend, call.epoch.endpoints, call.plan.ranks
    parts: list[ResultHandle | RankStream] = []
    rest, nbytes = iter(composed), 0
    try:
        # All arguments are pickled first, which may wait: for values, for capacity, or for ranks of another group.
        first = list(islice(rest, 1))
        with core.send_lock:  # calls reach all ranks in one order, whichever threads make them
            if core.epoch is not call.epoch and not core.epoch.takes(ranks, call.epoch):
                raise core.lifecycle.stale_error(call.epoch.number, call.method)
            for position, (rank, message) in enumerate(zip(ranks, chain(first, rest), strict=True)):
                if streaming is not None and call.plan.keeps(position):
                    parts.append(backend.stream(endpoints[rank], message, streaming.buffer))
                else:
                    parts.append(backend.submit(endpoints[rank], message, returns))
                nbytes += len(message.data)
        if streaming is not None:
            call.arrivals = PendingStream(backend, parts, streaming)
        else:
            call.arrivals = Results(backend, cast("list[ResultHandle]", parts))
    except BaseException as error:  # Ctrl-C too
        if parts and not backend.immediate:
            _half_sent(core, call, len(parts), error)
        call.tell_end(error)
        raise
    if len(ranks) == 1 and streaming is None and core.is_view:
        call.resend = Resend(first[0], returns)
    call.note_sent(nbytes)


def _half_sent(core: Group, call: Call, reached: int, error: BaseException) -> None:
    """Break the group, because only some ranks got a call: they would wait for the others in the next collective."""
    got = set(call.plan.ranks[:reached])
    text = (
        f"group {core.name!r}, {call.method}: {rank_list(got)} got the call, "
        f"{rank_list(set(call.plan.ranks) - got)} did not: sending was ended by {type(error).__name__}: {error}"
    )
    core.broken(CallCancelled(text, group=core.name, method=call.method), call.epoch)


def _check_there(core: Group, epoch: Epoch, plan: CallPlan, spec: MethodSpec) -> None:
    """Check that the ranks of a call, planned a moment ago, are still members.

    Raises:
        StaleEpoch: if a rank is leaving or has left.
    """
    there = len(epoch.endpoints) if spec.name == LIBRARY else epoch.size
    if any(rank >= there for rank in plan.ranks):
        raise core.lifecycle.stale_error(epoch.number, spec.title or spec.name)


def _header(core: Group, call: Call, spec: MethodSpec, returns: int) -> RankCall:
    together = not core.handle.independent and len(call.plan.ranks) == call.epoch.size
    # A view may not know the newest roster: ranks of a newer epoch refuse its calls.
    is_told = core.is_view or (core.owner and together)
    return RankCall(
        epoch=call.epoch.number if is_told else ANY_EPOCH,
        role=call.role,
        method=titled(spec.title) if spec.title else spec.name,
        returns=returns,
        readonly=spec.readonly,
        to_device=spec.to_device,
        number=call.number if core.debug or call.trace else 0,
        trace=call.trace,
    )


def _noted(call: Call, composed: Iterable[Message]) -> Iterator[Message]:
    """Yield the messages, and record them for restarts."""
    sent = list(composed)
    yield from sent
    call.core.reruns.add(call, sent)


def _verify(spec: MethodSpec, call: Call, outputs: Sequence[Any]) -> None:
    """Compare the outputs and the call order of ranks before the outputs are joined, in debug mode."""
    core = call.core
    if spec.replicated and call.plan.gather.collect != "none":
        check_replicated(core.name, call.method, call.plan.ranks, outputs)
    if spec.name != LIBRARY and len(call.plan.ranks) >= max(2, core.world_size):
        ranks = range(core.world_size)
        asked = CallPlan(ranks, (Same(handlers.call_log),), {}, GatherPlan("list", ranks))
        logs = send(core, asked, MethodSpec(LIBRARY), "").result(None)
        check_order(core.name, call.method, logs)


@dataclass(eq=False)
class Resend:
    """Sends a call of a single rank again, if the rank refused it.

    Attributes:
        message: the message of the call.
        returns: number of objects that the rank returns.
        repeats: number of times that it was sent again.
    """

    message: Message
    returns: int
    repeats: int = 0

    def __call__(self, call: CallInfo) -> bool:
        """Send the call again, by the newest roster, if its rank refused it. Return whether it was sent."""
        core: Group = call.core
        outcome, rank = call.arrivals.outcome(0), call.plan.ranks[0]
        is_over = outcome.ok or self.repeats >= _MOST_REPEATS
        if is_over or not was_refused(core, outcome, call.epoch.endpoints[rank]):
            return False
        epoch = core.epoch
        if core.handle.independent:  # any rank may run it
            number, takes = ANY_EPOCH, epoch.size > 0
        else:
            number, takes = epoch.number, epoch.number > call.epoch.number and rank < epoch.size
        if not takes:
            return False
        self.repeats += 1
        rank %= epoch.size
        message = self.message.unpack()._replace(epoch=number).pack(self.message.refs)
        call.epoch, call.plan = epoch, replace(call.plan, ranks=(rank,))
        sent = core.backend.submit(epoch.endpoints[rank], message, self.returns)
        call.arrivals = Results(core.backend, [sent])
        return True
