"""Diagnosis of each rank of a call that did not simply return, and the outcome of the call.

Ranks that are still at a failed or cancelled call are interrupted on the way. The call itself stops ranks and breaks
the group.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from phalanx.backends.backend_types import Backend, Lost, ProcessStatus, RankOutcome
from phalanx.calls.call_outcome import CallObservation, CallOutcome, decide
from phalanx.calls.call_state import CallState, Cancelling, Raised
from phalanx.calls.streams import PendingStream
from phalanx.collect.failures import looks_like_victim, tells_of_a_peer
from phalanx.errors import CallTimeout, FailureKind, RankReport
from phalanx.group.roster import note_change
from phalanx.wire.codec import Policy, decoding
from phalanx.wire.failure import report_of

CANCELLED_WITHIN_S = 10.0
"""Seconds that a caller waits for the result of a cancellation by another thread."""
_SHORT_WAIT_S = 0.5
_IN_ORDER = 32
"""Failures whose order is determined one by one."""


class Diagnosis:
    """Diagnosis of the ranks of a call that was sent.

    A *position* is an index into ``ranks``, ``endpoints``, ``arrivals`` and ``ids``, the ids under which the ranks know
    the call. ``owner`` says whether this process owns the group, so that no other process may end it.
    """

    def __init__(self, call: CallState) -> None:
        core, endpoints = call.core, call.epoch.endpoints
        self.call = call
        self.backend = core.backend
        self.group = core.name
        self.ranks = tuple(call.plan.ranks)
        self.endpoints = [endpoints[rank] for rank in self.ranks]
        self.arrivals = call.arrivals
        self.ids = call.arrivals.call_ids()
        self.owner = core.owner

    @property
    def _spares(self) -> bool:
        return self.call.core.spare and self.call.acts

    def observe_failure(self) -> CallObservation:
        """Report all ranks of a failed call that fail within the grace period, and its busy ranks.

        Where living ranks are to be kept, the busy ranks are interrupted and cut off their peers on the way.
        """
        reports, pending = self._failures()
        if self.owner and pending and all(map(tells_of_a_peer, reports)):
            gone, pending = self._gone(pending)
            reports += gone
        severed = False
        lost = [] if self.owner else self._losses_of_dead(reports)  # the owner would have closed it itself
        by_owner = bool(lost) and all(one.intended for one in lost)
        if pending and not self.owner and (by_owner or any(report.kind == "stale" for report in reports)):
            self._free(pending)  # for the owner's next calls; only the owner may stop the ranks
            pending = []
        # Ranks of another process's group may be cut off only where that will learn that it is broken.
        if self._spares and pending and (self.owner or lost):
            freed, pending, severed = self._free(pending)
            reports += freed
        if not by_owner:
            reports += self._reports_before_stop(pending)
        return CallObservation(
            "failed",
            self.group,
            self.call.method,
            reports,
            [self.ranks[position] for position in pending],
            severed=severed,
            by_owner=by_owner,
            owner_gone=any(one.owner_gone for one in lost),
            init=self.call.is_init,
        )

    def observe_late(self, waited: float | None, *, expired: bool) -> CallObservation:
        """Observe the call when a caller's patience, or its own deadline, is over."""
        everyone = range(len(self.ranks))
        pending = self.arrivals.wait(everyone, len(everyone), 0)[1]
        reports: list[RankReport] = []
        if pending:
            sights = dict(zip(pending, self._sights(pending), strict=True))
            reports = [self._late(position, sights.get(position)) for position in everyone]
        return CallObservation(
            "expired" if expired else "impatient",
            self.group,
            self.call.method,
            reports,
            [self.ranks[position] for position in pending],
            waited=waited,
            init=self.call.is_init,
        )

    def observe_cancel(self) -> CallObservation | None:
        """End the call on its ranks and report how each of them ended; None if all had ended before.

        Ranks that have not begun drop the call; running ranks are interrupted, and their collectives are aborted if
        they are still running after the grace period.
        """
        everyone = range(len(self.ranks))
        busy = self.arrivals.wait(everyone, len(everyone), 0)[1]
        if not busy:
            return None
        dropped = self._cancel(busy)
        self.arrivals.leave()
        running = [position for position in busy if position not in dropped]
        pending = self._still_at_it(running, self.call.core.grace_s)
        severed = bool(pending)
        if severed:  # perhaps in a collective, which nothing else ends
            self.backend.sever([self.endpoints[position] for position in pending])
            pending = self._still_at_it(running, _SHORT_WAIT_S)
        reports = self._after_cancel(dropped, pending)
        ranks = [self.ranks[position] for position in pending]
        return CallObservation("cancelled", self.group, self.call.method, reports, ranks, severed=severed)

    def _cancel(self, busy: Sequence[int]) -> list[int]:
        """Cancel the call on ranks; return the positions that certainly had not begun it, and never will."""
        drops = self.backend.cancel([self.endpoints[p] for p in busy], [self.ids[p] for p in busy])
        return [position for position, drop in zip(busy, drops, strict=True) if drop]

    def interrupt(self) -> None:
        """End a streaming call on the ranks that still run it: they would continue, or wait for a reader."""
        everyone = range(len(self.ranks))
        self._cancel(self.arrivals.wait(everyone, len(everyone), 0)[1])
        self.arrivals.leave()

    def _after_cancel(self, dropped: Sequence[int], pending: Sequence[int]) -> list[RankReport]:
        reports = [
            self.report(position)
            or replace(self._report(position, "cancelled"), state="finished", message="had returned before")
            for position in range(len(self.ranks))
            if position not in pending and position not in dropped
        ]
        reports += [replace(self._report(p, "cancelled"), message="had not begun it") for p in dropped]
        reports += [
            replace(report, kind="cancelled", message="did not end by itself, and was stopped", victim=False)
            for report in self._reports_before_stop(pending)
        ]
        return reports

    def _free(self, busy: Sequence[int]) -> tuple[list[RankReport], list[int], bool]:
        """Interrupt ranks that are still running a failed call, then abort their collectives.

        Returns:
            Their reports, the positions that are running even then, and whether process groups were aborted.
        """
        self._cancel(busy)
        self.arrivals.leave()
        cut = pending = self._still_at_it(busy, _SHORT_WAIT_S)
        if not self.owner:  # other calls of these ranks may be the owner's recovery of the group
            cut = pending = self._at_it_now(pending)
        if cut:  # in a collective, which nothing else ends
            self.backend.sever([self.endpoints[position] for position in cut])
            pending = self._still_at_it(cut, self.call.core.grace_s)
        ended = {position: self.report(position) for position in busy if position not in pending}
        reports = {position: report for position, report in ended.items() if report is not None}
        severed = any(looks_like_victim(report) for position, report in reports.items() if position in cut)
        return [replace(report, victim=True) for report in reports.values()], pending, severed

    def _gone(self, positions: Sequence[int]) -> tuple[list[RankReport], list[int]]:
        """Split positions that have not ended into reports of the ranks whose process or node died, and the rest.

        Peers may report a loss before the backend does, which may take seconds to call a node lost.
        """
        sights = self.backend.sights([self.endpoints[position] for position in positions], False)
        gone = [position for position, sight in zip(positions, sights, strict=True) if sight.gone]
        return [self.dead(position) for position in gone], [one for one in positions if one not in gone]

    def _still_at_it(self, positions: Sequence[int], seconds: float) -> list[int]:
        """Return the positions that have not ended after some seconds."""
        return self.arrivals.wait(positions, len(positions), seconds)[1] if positions else []

    def _failures(self) -> tuple[list[RankReport], list[int]]:
        """Return reports of the failed ranks, and the positions that had not ended at the end of the grace period.

        The grace period begins when the first failure is known, so that all ranks which fail with the same mistake, or
        because of it, are named in the error. The order of failures is determined for the first ranks only; after
        these, ranks that end within the grace period are collected in batches, since each wait checks all ranks that
        have not ended.
        """
        reports: list[RankReport] = []
        pending = list(range(len(self.ranks)))
        until: float | None = None
        for look in itertools.count():
            left = seconds_until(until, self.backend)
            many = until is not None and look >= _IN_ORDER
            done, pending = (
                self.arrivals.wait(pending, len(pending) if many else 1, left) if pending else ([], [])
            )
            if not done:
                break
            if pending and not many:
                more, pending = self.arrivals.wait(pending, len(pending), 0)
                done = [*done, *more]
            found = [report for report in map(self.report, done) if report is not None]
            reports += found
            if found and until is None:
                until = self.backend.now() + self.call.core.grace_s
        return reports, pending

    def report(self, position: int) -> RankReport | None:
        """Return the report of an ended rank; None if it returned."""
        at = self.backend.now()
        with decoding(Policy.VIEW):
            outcome = self.arrivals.outcome(position)
        if outcome.ok:
            return None
        if outcome.failure is not None:
            report = report_of(outcome.failure, at=at)
            return report if report.rank >= 0 else self._placed(report, position)
        return replace(self._report_of_lost(position, outcome), at=at)

    def _placed(self, report: RankReport, position: int) -> RankReport:
        """The report of a rank that did not say who it is."""
        known = self._report(position, report.kind)
        return replace(
            known,
            type_name=report.type_name,
            message=report.message,
            traceback=report.traceback,
            notes=report.notes,
            hint=report.hint,
            exception_bytes=report.exception_bytes,
            exception=report.exception,
            at=report.at,
        )

    def _report_of_lost(self, position: int, outcome: RankOutcome) -> RankReport:
        lost = outcome.lost or Lost("unknown")
        if self.owner or not lost.intended:
            lost = self.backend.post_mortem(self.endpoints[position], lost)
        return self._dead(position, lost)

    def dead(self, position: int) -> RankReport:
        """Return the report of a dead rank, though no call of it has reported the loss."""
        lost = self.backend.post_mortem(self.endpoints[position], None)
        return replace(self._dead(position, lost), at=self.backend.now())

    def _dead(self, position: int, lost: Lost) -> RankReport:
        report = self._report(position, "died")
        return replace(
            report,
            message=lost.reason,
            exit=lost.exit,
            hint=lost.hint,
            log_tail=lost.log_tail,
            log_path=lost.log_path or report.log_path,
            stack=lost.stack,
        )

    def _losses_of_dead(self, reports: Sequence[RankReport]) -> list[Lost]:
        """Return facts on the ranks that died; a process that ended on purpose was ended by the owner of the group."""
        died = [self.ranks.index(report.rank) for report in reports if report.kind == "died"]
        found = [self.arrivals.outcome(position).lost for position in died]
        return [one or Lost("unknown") for one in found]

    def _at_it_now(self, positions: Sequence[int]) -> list[int]:
        """Return the positions that are running this very call, and not an earlier call."""
        sights = self.backend.sights([self.endpoints[position] for position in positions], False)
        return [p for p, sight in zip(positions, sights, strict=True) if self.ids[p] in sight.running]

    def _reports_before_stop(self, positions: Sequence[int]) -> list[RankReport]:
        """The reports of ranks that had not ended and are about to be stopped, with where they stood."""
        at = self.backend.now()
        sights = self._sights(positions)
        return [
            replace(
                self._report(position, "stopped"),
                victim=True,
                message="had not ended when the call failed, and was stopped",
                stack=_stack(sight),
                at=at,
            )
            for position, sight in zip(positions, sights, strict=True)
        ]

    def _sights(self, positions: Sequence[int]) -> list[ProcessStatus]:
        if not positions:
            return []
        return self.backend.sights([self.endpoints[position] for position in positions], stacks=True)

    def _late(self, position: int, sight: ProcessStatus | None) -> RankReport:
        """The report of a rank when time is over; without a sight it had finished."""
        report = replace(self._report(position, "timeout"), since=self.backend.now() - self.call.started)
        if sight is None:
            return replace(report, state="finished", since=None)
        began = sight.running.get(self.ids[position])
        if not sight.reachable:
            return replace(report, state="unreachable", since=began or report.since, stack=_stack(sight))
        # Without a side channel nobody can tell a queued call from a running one.
        if began is not None or self.endpoints[position].facts.side is None:
            return replace(report, state="running", since=began or report.since, stack=_stack(sight))
        # Its stack shows the call that it is at instead.
        return replace(report, state="queued", stack=_stack(sight) if sight.running else "")

    def _report(self, position: int, kind: FailureKind) -> RankReport:
        facts = self.endpoints[position].facts
        ids = facts.slot.accelerator_ids
        return RankReport(
            rank=self.ranks[position],
            kind=kind,
            role=self.call.role or None,
            method=self.call.method,
            host=facts.slot.host,
            pid=facts.pid,
            accelerator=f"GPU {','.join(ids)}" if ids else None,
            node_id=facts.slot.node_id,
            log_path=facts.log,
        )


def _stack(sight: ProcessStatus) -> str:
    return sight.stack or (f"({sight.note})" if sight.note else "")


def earliest(first: float | None, second: float | None) -> float | None:
    """The earlier of two moments, None being never."""
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)


def seconds_until(limit: float | None, backend: Backend) -> float | None:
    """Seconds from now to a moment on the backend's clock."""
    return None if limit is None else max(0.0, limit - backend.now())


def outcome_when_late(call: CallState, limit: float | None) -> CallOutcome:
    """How it stands when ``limit``, the end of somebody's patience, or its own deadline is over."""
    if call.deadline is None or (limit is not None and limit < call.deadline):
        waited = (call.core.backend.now() if limit is None else limit) - call.started
        return decide(Diagnosis(call).observe_late(round(max(0.0, waited), 3), expired=False))
    return decide(Diagnosis(call).observe_late(call.limit, expired=True))


def late_now(call: CallState) -> CallOutcome:
    """Return the outcome for a caller whose patience is over now."""
    waited = call.core.backend.now() - call.started
    return decide(Diagnosis(call).observe_late(round(waited, 1), expired=False))


def not_yet(call: CallState, timeout: float | None) -> CallTimeout:
    """The error for a wait that was over before another thread's wait for the same call."""
    error = decide(Diagnosis(call).observe_late(timeout, expired=False)).error
    if isinstance(error, CallTimeout):
        return error
    group, method = call.core.name, call.method
    text = f"group {group!r}, {method}: another thread is fetching the result just now; ask again"
    return CallTimeout(text, group=group, method=method, timeout=timeout)


def outcome_of_failure(call: CallState) -> CallOutcome:
    """Return the outcome of a call of which a rank failed, or ended with another call, a close or a restart.

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
    looks = Diagnosis(call)
    if isinstance(call.arrivals, PendingStream):
        looks.interrupt()
    seen = looks.observe_failure()
    core.check_current(call.epoch, ranks, call.method)
    if core.closed:
        return decide(CallObservation("failed", core.name, call.method, closed=True))
    if seen.by_owner and not seen.owner_gone and core.is_view and note_change(core):
        return CallOutcome(core.lifecycle.changing_error(call.method))
    return decide(seen)
