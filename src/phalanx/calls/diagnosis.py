"""Diagnosis of each rank of a call that did not simply return, and the outcome of the call, which ``decide`` decides.

Ranks that still run a failed or cancelled call are interrupted. Stopping ranks and breaking the group is left to the
call. A *position* is an index into the ranks of a call.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from phalanx.backends.backend_types import Backend, Endpoint, Lost, ProcessStatus
from phalanx.calls.call_state import CallInfo, PendingStream, seconds_until
from phalanx.collect.failures import combine, looks_like_victim, tells_of_a_peer, with_victims
from phalanx.collect.message import render
from phalanx.errors import CallCancelled, CallTimeout, FailureKind, GroupClosed, RankReport, RankState
from phalanx.group.roster import note_change
from phalanx.wire.call_page import SETUP_CALL
from phalanx.wire.codec import decoding
from phalanx.wire.failure import report_of

CANCELLED_WITHIN_S = 10.0
"""Seconds that a caller waits for the result of a cancellation by another thread."""
_SHORT_WAIT_S = 0.5
_IN_ORDER = 32
"""Number of waits that collect failures in their order; later failures are collected in batches."""


@dataclass(frozen=True)
class CallObservation:
    """Facts about a call that did not simply return.

    Attributes:
        why: a rank failed, a caller's timeout ("impatient") or the deadline ("expired") has passed, or a caller
            cancels the call.
        reports: reports of the failed, late or cancelled ranks.
        pending: ranks that had not ended at the end of the grace period.
        waited: seconds of the wait.
        severed: True if collectives were aborted.
        by_owner: True if all dead ranks were ended on purpose by the group's owner, or ended with it.
        owner_gone: True if the owner itself had ended.
        init: True for a call of constructors.
    """

    why: Literal["failed", "impatient", "expired", "cancelled"]
    group: str
    method: str
    reports: Sequence[RankReport] = ()
    pending: Sequence[int] = ()
    waited: float | None = None
    severed: bool = False
    by_owner: bool = False
    owner_gone: bool = False
    init: bool = False


@dataclass(frozen=True)
class CallOutcome:
    """Outcome of a call: its error (None: all ranks returned after all), and the consequences for the group.

    ``stop`` are the ranks to stop. ``breaks`` is True if the group breaks, ``closes`` if its owner has closed it.
    ``over`` is False if only this wait is over and the call continues.
    """

    error: BaseException | None = None
    stop: Sequence[int] = ()
    breaks: bool = False
    closes: bool = False
    over: bool = True


def decide(seen: CallObservation) -> CallOutcome:
    """Decide the outcome of a call from an observation. Pure."""
    if seen.why == "cancelled":
        return _cancelled(seen)
    if seen.why == "failed":
        return _failed(seen)
    if not seen.pending:
        return CallOutcome(over=False)  # all ranks have ended since the observation
    error = combine(seen.group, seen.method, seen.reports, timeout=seen.waited, init=seen.init)
    if seen.why == "impatient":
        return CallOutcome(error, over=False)
    return CallOutcome(error, stop=seen.pending, breaks=True)


def _failed(seen: CallObservation) -> CallOutcome:
    if seen.by_owner:
        closed = f"group {seen.group!r} was closed, or restarted, by its owner before {seen.method} ended"
        return CallOutcome(GroupClosed(closed, group=seen.group), stop=seen.pending, closes=True)
    error = combine(seen.group, seen.method, seen.reports, init=seen.init)
    died = any(report.kind == "died" for report in seen.reports)
    return CallOutcome(error, stop=seen.pending, breaks=bool(seen.pending) or died or seen.severed)


def _cancelled(seen: CallObservation) -> CallOutcome:
    """Decide the outcome of a cancellation: none if every rank had returned before."""
    if not seen.pending and all(report.state == "finished" for report in seen.reports):
        return CallOutcome(over=False)
    failures = with_victims(seen.reports)
    message = render(seen.group, seen.method, failures)
    error = CallCancelled(message, group=seen.group, method=seen.method, failures=failures)
    breaks = seen.severed or bool(seen.pending) or any(report.kind == "died" for report in failures)
    return CallOutcome(error, stop=seen.pending, breaks=breaks)


class Diagnosis:
    """Diagnosis of the ranks of a call that was sent.

    ``ids`` are the ids of the call on its ranks. ``owner`` is False if another process owns the group.
    """

    def __init__(self, call: CallInfo) -> None:
        self.call = call
        self.backend = call.core.backend
        self.ranks = tuple(call.plan.ranks)
        self.endpoints = [call.epoch.endpoints[rank] for rank in self.ranks]
        self.arrivals = call.arrivals
        self.ids = call.arrivals.call_ids()
        self.owner = call.core.owner
        self.grace_s = call.core.grace_s

    def observe_failure(self) -> CallObservation:
        """Report the ranks of a failed call that fail within the grace period, and the ranks that are busy after it.

        If living ranks are worth keeping, busy ranks are interrupted and their collectives are aborted.
        """
        if isinstance(self.arrivals, PendingStream):  # its ranks would continue, or wait for a reader
            self._interrupt(self.arrivals.pending())
        reports, pending = self._failures()
        if self.owner and pending and all(map(tells_of_a_peer, reports)):
            # Peers may report a loss before the backend, which may need seconds to notice the loss of a node.
            gone = [position for position, status in self._inspected(pending).items() if status.gone]
            reports += [report_of_death(self.backend, self.endpoints[p], self._place(p)) for p in gone]
            pending = [position for position in pending if position not in gone]
        severed, lost = False, list[Lost]()
        if not self.owner:  # an owner knows whether it ended the ranks
            died = [self.ranks.index(report.rank) for report in reports if report.kind == "died"]
            lost = [self.arrivals.outcome(position).lost or Lost("unknown") for position in died]
        by_owner = bool(lost) and all(one.intended for one in lost)
        if pending and not self.owner and (by_owner or any(report.kind == "stale" for report in reports)):
            self._free(pending)  # for the owner's next calls; only the owner may stop the ranks
            pending = []
        # Collectives of another process's group are aborted only if its owner will learn that the group is broken.
        if pending and self.call.core.spare and self.call.acts and (self.owner or lost):
            freed, pending, severed = self._free(pending)
            reports += freed
        reports += self._before_stop(
            pending, "stopped", "had not ended when the call failed, and was stopped", victim=True
        )
        owners = {"by_owner": by_owner, "owner_gone": any(one.owner_gone for one in lost)}
        return self._seen("failed", reports, pending, severed=severed, **owners)

    def observe_late(self, waited: float | None, *, expired: bool = False) -> CallObservation:
        """Observe the call at the end of a caller's wait of ``waited`` seconds or, if ``expired``, at its deadline."""
        pending = self.arrivals.pending()
        statuses = self._inspected(pending, stacks=True)
        reports = [self._late(p, statuses.get(p)) for p in range(len(self.ranks))] if pending else []
        return self._seen("expired" if expired else "impatient", reports, pending, waited=waited)

    def observe_cancel(self) -> CallObservation:
        """End the call on its ranks and report the end of each rank; no reports if all had ended before.

        Ranks that have not begun drop the call; running ranks are interrupted, and their collectives are aborted if
        they are still running after the grace period.
        """
        busy = self.arrivals.pending()
        if not busy:
            return self._seen("cancelled", (), ())
        dropped = self._interrupt(busy)
        running = [position for position in busy if position not in dropped]
        cut = self._still_at_it(running, self.grace_s)
        pending = self._sever(cut, _SHORT_WAIT_S)  # perhaps in a collective, which nothing else ends
        reports = [self._after_cancel(p, p in dropped) for p in range(len(self.ranks)) if p not in pending]
        reports += self._before_stop(pending, "cancelled", "did not end by itself, and was stopped")
        return self._seen("cancelled", reports, pending, severed=bool(cut))

    def _seen(
        self, why: Any, reports: Sequence[RankReport], pending: Sequence[int], **more: Any
    ) -> CallObservation:
        call, ranks = self.call, [self.ranks[position] for position in pending]
        is_init = call.number == SETUP_CALL
        return CallObservation(why, call.core.name, call.method, reports, ranks, init=is_init, **more)

    def _interrupt(self, busy: Sequence[int]) -> list[int]:
        """Cancel the call on ranks; return the positions that had not begun it, and never will."""
        drops = self.backend.cancel([self.endpoints[p] for p in busy], [self.ids[p] for p in busy])
        self.arrivals.leave()
        return [position for position, drop in zip(busy, drops, strict=True) if drop]

    def _sever(self, positions: Sequence[int], seconds: float) -> list[int]:
        """Abort collectives of ranks; return the positions that have not ended ``seconds`` later."""
        self.backend.sever([self.endpoints[position] for position in positions])
        return self._still_at_it(positions, seconds)

    def _after_cancel(self, position: int, dropped: bool) -> RankReport:
        if dropped:
            return self._report(position, "cancelled", message="had not begun it")
        returned = self._report(position, "cancelled", state="finished", message="had returned before")
        return self.report(position) or returned

    def _free(self, busy: Sequence[int]) -> tuple[list[RankReport], list[int], bool]:
        """Interrupt ranks that are still running a failed call, then abort their collectives.

        Returns:
            Reports of the ranks that failed, the positions that still run, and whether an abort ended a collective.
        """
        self._interrupt(busy)
        cut = self._still_at_it(busy, _SHORT_WAIT_S)
        if not self.owner:  # these ranks may be in another call by now, such as the owner's recovery
            cut = [p for p, status in self._inspected(cut).items() if self.ids[p] in status.running]
        pending = self._sever(cut, self.grace_s)  # perhaps in a collective, which nothing else ends
        ended = [self.report(position) for position in busy if position not in pending]
        reports = [replace(report, victim=True) for report in ended if report is not None]
        # an aborted operation of NCCL, on an accelerator, raises no error
        severed = bool(cut) and any(one.accelerator or looks_like_victim(one) for one in reports)
        return reports, pending, severed

    def _still_at_it(self, positions: Sequence[int], seconds: float) -> list[int]:
        """Return the positions that have not ended after ``seconds``."""
        return self.arrivals.wait(positions, len(positions), seconds)[1] if positions else []

    def _failures(self) -> tuple[list[RankReport], list[int]]:
        """Return reports of the failed ranks, and the positions that had not ended at the end of the grace period.

        The grace period begins when the first failure is known, so that all ranks which fail with the same mistake, or
        because of it, are named in the error. Each wait checks all pending ranks, so only the first failures are
        collected in their order.
        """
        reports: list[RankReport] = []
        pending = list(range(len(self.ranks)))
        until: float | None = None
        for look in itertools.count():
            if not pending:
                break
            count = 1 if until is None or look < _IN_ORDER else len(pending)
            done, pending = self.arrivals.wait(pending, count, seconds_until(until, self.backend))
            if not done:
                break
            more = [] if not pending else self.arrivals.wait(pending, len(pending), 0)[0]
            pending = [position for position in pending if position not in more]
            found = [report for report in map(self.report, [*done, *more]) if report is not None]
            reports += found
            if found and until is None:
                until = self.backend.now() + self.grace_s
        return reports, pending

    def report(self, position: int) -> RankReport | None:
        """Return the report of an ended rank; None if it returned."""
        at = self.backend.now()
        with decoding(readonly=True):
            outcome = self.arrivals.outcome(position)
        if outcome.ok:
            return None
        if outcome.failure is not None:
            report = report_of(outcome.failure, at=at)
            return report if report.rank >= 0 else replace(report, **self._place(position))
        lost = outcome.lost or Lost("unknown")
        if self.owner or not lost.intended:
            lost = self.backend.post_mortem(self.endpoints[position], lost)
        return _dead_report(lost, at=at, **self._place(position))

    def _before_stop(
        self, positions: Sequence[int], kind: FailureKind, message: str, victim: bool = False
    ) -> list[RankReport]:
        """Return reports, with stacks, of ranks that have not ended and are about to be stopped."""
        at = self.backend.now()
        return [
            self._report(position, kind, victim=victim, message=message, stack=_stack(status), at=at)
            for position, status in self._inspected(positions, stacks=True).items()
        ]

    def _inspected(self, positions: Sequence[int], stacks: bool = False) -> dict[int, ProcessStatus]:
        """Return the status of the ranks' processes, observed from their nodes, by position."""
        endpoints = [self.endpoints[position] for position in positions]
        return dict(zip(positions, self.backend.inspect(endpoints, stacks) if endpoints else (), strict=True))

    def _late(self, position: int, status: ProcessStatus | None) -> RankReport:
        """Return the report of a rank after a timeout. A rank without a status had finished."""
        if status is None:
            return self._report(position, "timeout", state="finished")
        began, waited = status.running.get(self.ids[position]), self.backend.now() - self.call.started
        state: RankState = "queued"
        if not status.reachable:
            state = "unreachable"
        # Without a side channel, a queued call cannot be told from a running call.
        elif began is not None or self.endpoints[position].facts.side is None:
            state = "running"
        # The stack of a rank with a queued call shows the call that it runs instead.
        stack = "" if state == "queued" and not status.running else _stack(status)
        return self._report(position, "timeout", state=state, since=began or waited, stack=stack)

    def _report(self, position: int, kind: FailureKind, **more: Any) -> RankReport:
        return RankReport(kind=kind, **self._place(position), **more)

    def _place(self, position: int) -> dict[str, Any]:
        return place_of(self.endpoints[position], self.ranks[position], self.call.role, self.call.method)


def place_of(endpoint: Endpoint, rank: int, role: str, method: str) -> dict[str, Any]:
    """Return the fields of a report that identify the process and the called method."""
    facts = endpoint.facts
    ids = facts.slot.accelerator_ids
    return {
        "rank": rank,
        "role": role or None,
        "method": method,
        "host": facts.slot.host,
        "pid": facts.pid,
        "accelerator": f"GPU {','.join(ids)}" if ids else None,
        "node_id": facts.slot.node_id,
        "log_path": facts.log,
    }


def report_of_death(backend: Backend, endpoint: Endpoint, place: dict[str, Any]) -> RankReport:
    """Return the report of a rank that died without a report of its own; ``place`` is from :func:`place_of`."""
    return _dead_report(backend.post_mortem(endpoint, None), at=backend.now(), **place)


def _dead_report(lost: Lost, *, log_path: str | None, **more: Any) -> RankReport:
    """Return the report of a dead rank."""
    return RankReport(
        kind="died",
        message=lost.reason,
        exit=lost.exit,
        hint=lost.hint,
        log_tail=lost.log_tail,
        log_path=lost.log_path or log_path,
        stack=lost.stack,
        **more,
    )


def _stack(status: ProcessStatus) -> str:
    return status.stack or (f"({status.note})" if status.note else "")


def outcome_when_late(call: CallInfo, limit: float | None) -> CallOutcome:
    """Return the outcome of a call after ``limit``, the end of a caller's wait, or after its own deadline."""
    if call.deadline is not None and (limit is None or limit >= call.deadline):
        return decide(Diagnosis(call).observe_late(call.limit, expired=True))
    waited = (call.core.backend.now() if limit is None else limit) - call.started
    return decide(Diagnosis(call).observe_late(round(max(0.0, waited), 3)))


def not_yet(call: CallInfo, timeout: float | None) -> CallTimeout:
    """Return the error of a wait that ended before another thread's wait for the same call."""
    error = decide(Diagnosis(call).observe_late(timeout)).error
    if isinstance(error, CallTimeout):
        return error
    group, method = call.core.name, call.method
    text = f"group {group!r}, {method}: another thread is fetching the result; wait again"
    return CallTimeout(text, group=group, method=method, timeout=timeout)


def outcome_of_failure(call: CallInfo, cause: BaseException | None) -> CallOutcome:
    """Return the outcome of a call that failed on a rank, or was ended by another call, a close or a restart.

    If all ranks returned, its error is ``cause``: this process could not decode an output.

    Raises:
        StaleEpoch: if a rank of the call was replaced.
    """
    core, ranks = call.core, call.plan.ranks
    core.check_current(call.epoch, ranks, call.method)
    limit = time.monotonic() + CANCELLED_WITHIN_S
    while call.error is None and call.cancels.locked() and time.monotonic() < limit:
        time.sleep(0.01)  # Ctrl-C after taking the lock would leave it locked
    if call.error is not None:
        return CallOutcome(call.error)
    if not core.closed and not call.epoch.stopped.isdisjoint(ranks):
        # it failed together with another call, which has the cause
        return CallOutcome(core.lifecycle.broken_error())
    seen = None if core.closed else Diagnosis(call).observe_failure()
    core.check_current(call.epoch, ranks, call.method)
    if seen is None or core.closed:
        closed = f"group {core.name!r} was closed before {call.method} ended"
        return CallOutcome(GroupClosed(closed, group=core.name))
    if seen.by_owner and not seen.owner_gone and core.is_view and note_change(core):
        return CallOutcome(core.lifecycle.changing_error(call.method))
    return CallOutcome(cause) if cause is not None and not (seen.reports or seen.pending) else decide(seen)
