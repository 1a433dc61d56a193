"""Watches a call to its end: all values, or one error that names the ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from phalanx.collect.failures import combine, with_victims
from phalanx.collect.join import gather, whole, with_rests
from phalanx.collect.message import render
from phalanx.errors import CallCancelled, CallTimeout, GroupClosed, PhalanxError, RankReport
from phalanx.runtime.calls.agreement import check_replicated
from phalanx.transport.base import Endpoint, FetchFailed, Lost, NotReady, Outcome, Sight, Transport
from phalanx.wire.arrival import Meter
from phalanx.wire.codec import Policy, decoding
from phalanx.wire.failure import report_of

if TYPE_CHECKING:
    from phalanx.runtime.calls.future import CallFuture


class Watch:
    """One call under way: which endpoint and ticket belong to which rank, and what is known of each.

    A *position* is an index into ``ranks``, ``endpoints`` and ``refs``. ``call`` is the number under which the
    ranks know the call; ``owner`` says whether this process owns the group, so that nobody else may end it.
    """

    def __init__(
        self,
        transport: Transport,
        group: str,
        method: str,
        role: str,
        ranks: Sequence[int],
        endpoints: Sequence[Endpoint],
        refs: Sequence[Any],
        grace_s: float,
        *,
        call: int = 0,
        owner: bool = True,
        started: float | None = None,
        meter: Meter | None = None,
        rests: Sequence[Any] = (),
    ) -> None:
        self.transport = transport
        self.group = group
        self.method = method
        self.role = role
        self.ranks = tuple(ranks)
        self.endpoints = tuple(endpoints)
        self.refs = tuple(refs)
        self.rests = tuple(rests)  # second halves of the outputs, by position, where they may come in two
        self.grace_s = grace_s
        self.call = call
        self.owner = owner
        self.meter = meter
        self.started = transport.now() if started is None else started

    def values(self, limit: float | None, policy: Policy) -> list[Any]:
        """The outputs of all ranks. Raises FetchFailed or NotReady as the transport does."""
        return fetched(self.transport, self.refs, self.rests, limit, policy, self.meter)

    def _until(self, limit: float | None) -> float | None:
        return seconds_until(limit, self.transport)

    def failure(self) -> tuple[list[RankReport], list[int]]:
        """Reports of the ranks that failed, and the positions that had not ended when the grace was over.

        The grace begins when the first failure is known, so that ranks which fail with the same mistake, or
        because of it, are all named in one error.
        """
        reports: list[RankReport] = []
        pending = list(range(len(self.refs)))
        until: float | None = None
        while pending:
            done, rest = self.transport.wait([self.refs[p] for p in pending], 1, self._until(until))
            if not done:
                break
            for position in (pending[index] for index in done):
                report = self.report(position)
                if report is not None:
                    reports.append(report)
                    until = until if until is not None else self.transport.now() + self.grace_s
            pending = [pending[index] for index in rest]
        return reports, pending

    def report(self, position: int) -> RankReport | None:
        """What is wrong with an ended rank; None for one that returned."""
        at = self.transport.now()
        with decoding(Policy.VIEW):
            outcome = self.transport.outcome(self.refs[position])
        if outcome.ok:
            return None
        if outcome.failure is not None:
            report = report_of(outcome.failure, at=at)
            return report if report.rank >= 0 else replace(report, rank=self.ranks[position])
        return replace(self._of_lost(position, outcome), at=at)

    def _of_lost(self, position: int, outcome: Outcome) -> RankReport:
        lost = outcome.lost or Lost("unknown")
        if self.owner or not lost.intended:
            lost = self.transport.post_mortem(self.endpoints[position], lost)
        return self.dead(position, lost)

    def dead(self, position: int, lost: Lost) -> RankReport:
        """The report of a rank whose process is gone."""
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

    def intended(self, position: int) -> bool:
        """Whether the process of an ended rank was ended on purpose, by the owner of the group."""
        if self.owner:
            return False  # then it would be closed
        lost = self.transport.outcome(self.refs[position]).lost
        return lost is not None and lost.intended

    def stopped(self, positions: Sequence[int]) -> list[RankReport]:
        """The reports of ranks that had not ended and are about to be stopped, with where they stood."""
        at = self.transport.now()
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

    def _sights(self, positions: Sequence[int]) -> list[Sight]:
        if not positions:
            return []
        return self.transport.sights([self.endpoints[position] for position in positions], stacks=True)

    def _late(self, position: int, sight: Sight | None) -> RankReport:
        """The report of a rank when the deadline passed; without a sight it had finished."""
        report = replace(self._report(position, "timeout"), since=self.transport.now() - self.started)
        if sight is None:
            return replace(report, state="finished", since=None)
        began = sight.running.get(self.call)
        if not sight.reachable:
            return replace(report, state="unreachable", since=began or report.since, stack=_stack(sight))
        if began is not None or self.endpoints[position].facts.side is None:
            return replace(report, state="running", since=began or report.since, stack=_stack(sight))
        # Its stack shows the call that it is at instead.
        return replace(report, state="queued", stack=_stack(sight) if sight.running else "")

    def _report(self, position: int, kind: Any) -> RankReport:
        facts = self.endpoints[position].facts
        ids = facts.slot.accelerator_ids
        return RankReport(
            rank=self.ranks[position],
            kind=kind,
            role=self.role or None,
            method=self.method,
            host=facts.slot.host,
            pid=facts.pid,
            accelerator=f"GPU {','.join(ids)}" if ids else None,
            node_id=facts.slot.node_id,
            log_path=facts.log,
        )

    def error(self, *, init: bool = False) -> tuple[PhalanxError, list[int], bool]:
        """The error of a failed call, the positions still running, and whether a process is gone."""
        reports, pending = self.failure()
        dead = [report for report in reports if report.kind == "died"]
        if dead and all(self.intended(self.ranks.index(report.rank)) for report in dead):
            closed = GroupClosed(
                f"group {self.group!r} was closed, or restarted, by its owner before {self.method} ended",
                group=self.group,
            )
            return closed, pending, True
        reports += self.stopped(pending)
        return combine(self.group, self.method, reports, init=init), pending, bool(dead)

    def timeout(self, timeout: float | None, *, init: bool = False) -> tuple[CallTimeout, list[int]] | None:
        """The error for a deadline that passed, and the positions that had not ended; None if all have by now."""
        _, pending = self.transport.wait(self.refs, len(self.refs), 0)
        if not pending:
            return None
        sights = dict(zip(pending, self._sights(pending), strict=True))
        reports = with_victims([self._late(p, sights.get(p)) for p in range(len(self.refs))])
        error = combine(self.group, self.method, reports, timeout=timeout, init=init)
        if not isinstance(error, CallTimeout):
            raise error
        return error, pending

    def cancelled(self, dropped: Sequence[int], pending: Sequence[int]) -> CallCancelled | None:
        """The error of a call that was cancelled, with what became of it on each rank; None if all returned.

        ``dropped`` are the positions that had not begun it, ``pending`` those that do not end by themselves.
        """
        ended = [p for p in range(len(self.refs)) if p not in pending and p not in dropped]
        reports = [self.report(p) for p in ended]
        if not pending and not dropped and all(report is None for report in reports):
            return None
        found = [
            report or replace(self._report(p, "cancelled"), state="finished", message="had returned before")
            for p, report in zip(ended, reports, strict=True)
        ]
        found += [replace(self._report(p, "cancelled"), message="had not begun it") for p in dropped]
        found += [
            replace(report, kind="cancelled", message="did not end by itself, and was stopped", victim=False)
            for report in self.stopped(pending)
        ]
        failures = with_victims(found)
        message = render(self.group, self.method, failures)
        return CallCancelled(message, group=self.group, method=self.method, failures=failures)

    def stream(self, limit: float | None) -> Iterator[tuple[int, Any]]:
        """(rank, output) as they come. Raises FetchFailed or NotReady."""
        pending = list(range(len(self.refs)))
        while pending:
            done, rest = self.transport.wait([self.refs[p] for p in pending], 1, self._until(limit))
            if not done:
                raise NotReady
            for position in (pending[index] for index in done):
                refs = [self.refs[position], *self.rests[position : position + 1]]
                with decoding(meter=self.meter):
                    output, *second = self.transport.fetch(refs)
                yield self.ranks[position], whole(with_rests([output], second)[0])
            pending = [pending[index] for index in rest]


def _stack(sight: Sight) -> str:
    return sight.stack or (f"({sight.note})" if sight.note else "")


def earliest(first: float | None, second: float | None) -> float | None:
    """The earlier of two moments, None being never."""
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)


def seconds_until(limit: float | None, transport: Transport) -> float | None:
    """Seconds from now to a moment on the transport's clock."""
    return None if limit is None else max(0.0, limit - transport.now())


def fetched(
    transport: Transport,
    refs: Sequence[Any],
    rests: Sequence[Any],
    limit: float | None,
    policy: Policy,
    meter: Meter | None,
) -> list[Any]:
    """The outputs behind some references, each with its second half. Raises FetchFailed or NotReady."""
    with decoding(policy, meter=meter):
        outputs = transport.fetch([*refs, *rests] if rests else refs, seconds_until(limit, transport))
    if rests:
        outputs = with_rests(outputs[: len(refs)], outputs[len(refs) :])
    if meter is not None:
        for output in outputs:
            if type(output) is bytes or type(output) is str:  # these come as they are, not encoded
                meter.add(len(output))
    return outputs


def settled_value(future: CallFuture[Any], transport: Transport, limit: float | None, meter: Meter) -> Any:
    """The value of a call whose ranks all returned: decoded straight into its place where rows are joined.

    Raises FetchFailed or NotReady.
    """
    plan, draft = future.plan, future.draft
    refs = [ticket.value for ticket in future.tickets]
    rests = [ticket.rest for ticket in future.tickets if ticket.rest is not None]
    policy = Policy.VIEW if plan.gather.how == "rows" else Policy.PRIVATE
    outputs = fetched(transport, refs, rests, limit, policy, meter)
    if draft is not None:
        draft.arrived()
    if future.replicated:
        check_replicated(future.group, future.method, plan.ranks, outputs)
    value = gather(plan.gather, outputs, future.target)
    if draft is not None:
        draft.joined = time.time_ns()
    return value


__all__ = ["FetchFailed", "NotReady", "Watch", "earliest", "settled_value"]
