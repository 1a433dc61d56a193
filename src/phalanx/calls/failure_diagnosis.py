"""How a call ends that did not simply return, found out by looking at its ranks; what follows is left to the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from phalanx.calls.call_outcome import CallObservation, CallOutcome, decide
from phalanx.calls.call_status import Cancelling, Raised, Status
from phalanx.calls.rank_monitor import RankMonitor
from phalanx.calls.results import Results
from phalanx.calls.streams import PendingStream
from phalanx.dispatch.plan import CallPlan
from phalanx.errors import CallTimeout
from phalanx.group.epoch import Epoch
from phalanx.group.group import Group
from phalanx.group.roster import note_change

CANCELLED_WITHIN_S = 10.0
"""How long one who meets a call that somebody else cancels waits for how that went."""


class LookedAt(Protocol):
    """What is known of a call whose ranks are looked at."""

    core: Group
    epoch: Epoch
    plan: CallPlan
    role: str
    method: str
    number: int
    numbers: Sequence[int] | None
    acts: bool
    is_init: bool
    arrivals: Results
    started: float
    limit: float | None
    deadline: float | None
    status: Status


def watch(call: LookedAt) -> RankMonitor:
    """What looks at its ranks."""
    core, endpoints = call.core, call.epoch.endpoints
    return RankMonitor(
        transport=core.transport,
        group=core.name,
        method=call.method,
        role=call.role,
        ranks=tuple(call.plan.ranks),
        endpoints=[endpoints[rank] for rank in call.plan.ranks],
        arrivals=call.arrivals,
        grace_s=core.grace_s,
        started=call.started,
        numbers=call.numbers or [call.number] * len(call.plan.ranks),
        owner=core.owner,
        init=call.is_init,
        spare=core.spare and call.acts,
    )


def late(call: LookedAt, limit: float | None) -> CallOutcome:
    """How it stands when ``limit``, the end of somebody's patience, or its own deadline is over."""
    if call.deadline is None or (limit is not None and limit < call.deadline):
        waited = (call.core.transport.now() if limit is None else limit) - call.started
        return decide(watch(call).late(round(max(0.0, waited), 3), expired=False))
    return decide(watch(call).late(call.limit, expired=True))


def late_now(call: LookedAt) -> CallOutcome:
    """What somebody whose patience is over now would be told."""
    waited = call.core.transport.now() - call.started
    return decide(watch(call).late(round(waited, 1), expired=False))


def not_yet(call: LookedAt, timeout: float | None) -> CallTimeout:
    """The error for a wait that was over before another thread's wait for the same call."""
    error = decide(watch(call).late(timeout, expired=False)).error
    if isinstance(error, CallTimeout):
        return error
    group, method = call.core.name, call.method
    text = f"group {group!r}, {method}: another thread is fetching the result just now; ask again"
    return CallTimeout(text, group=group, method=method, timeout=timeout)


def failed(call: LookedAt) -> CallOutcome:
    """How it ends where a rank failed; also because others made it end.

    Raises:
        StaleEpoch: its ranks are others by now.
    """
    core, ranks = call.core, call.plan.ranks
    core.check_current(call.epoch, ranks, call.method)
    if isinstance(call.status, Cancelling):
        call.status.over.wait(CANCELLED_WITHIN_S)
    if isinstance(call.status, Raised):
        return CallOutcome(call.status.error)
    if not core.closed and not call.epoch.stopped.isdisjoint(ranks):
        return CallOutcome(
            core.lifecycle.broken_error()
        )  # it went down with another call, which has the cause
    if core.closed:
        return decide(CallObservation("failed", core.name, call.method, closed=True))
    looks = watch(call)
    if isinstance(call.arrivals, PendingStream):
        looks.interrupt()
    seen = looks.failed()
    core.check_current(call.epoch, ranks, call.method)
    if core.closed:
        return decide(CallObservation("failed", core.name, call.method, closed=True))
    if seen.by_owner and not seen.owner_gone and core.is_view and note_change(core):
        return CallOutcome(core.lifecycle.changing_error(call.method))
    return decide(seen)
