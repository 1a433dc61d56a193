"""Watches a call to its end: all values, or one error that names the ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from phalanx.collect.failures import combine
from phalanx.collect.join import gather
from phalanx.errors import CallTimeout, GroupClosed, PhalanxError, RankReport
from phalanx.transport.base import Endpoint, FetchFailed, Lost, NotReady, Outcome, Transport
from phalanx.wire.codec import Policy, decoding
from phalanx.wire.failure import report_of

if TYPE_CHECKING:
    from phalanx.runtime.future import CallFuture


class Watch:
    """One call under way: which endpoint and ticket belong to which rank, and what is known of each."""

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
    ) -> None:
        self.transport = transport
        self.group = group
        self.method = method
        self.role = role
        self.ranks = tuple(ranks)
        self.endpoints = tuple(endpoints)
        self.refs = tuple(refs)
        self.grace_s = grace_s
        self.started = time.monotonic()

    def values(self, limit: float | None, policy: Policy) -> list[Any]:
        """The outputs of all ranks. Raises FetchFailed or NotReady as the transport does."""
        remaining = None if limit is None else max(0.0, limit - time.monotonic())
        with decoding(policy):
            return self.transport.fetch(self.refs, remaining)

    def failure(self) -> tuple[list[RankReport], list[int]]:
        """Reports of the ranks that failed, and the positions that had not ended when the grace was over.

        The grace begins when the first failure is known, so that ranks which fail with the same mistake, or
        because of it, are all named in one error.
        """
        reports: list[RankReport] = []
        pending = list(range(len(self.refs)))
        until: float | None = None
        while pending:
            timeout = None if until is None else max(0.0, until - time.monotonic())
            done, rest = self.transport.wait([self.refs[p] for p in pending], 1, timeout)
            if not done:
                break
            for position in (pending[index] for index in done):
                report = self.report(position)
                if report is not None:
                    reports.append(report)
                    until = until or time.monotonic() + self.grace_s
            pending = [pending[index] for index in rest]
        return reports, pending

    def report(self, position: int) -> RankReport | None:
        """What is wrong with an ended rank; None for one that returned."""
        with decoding(Policy.VIEW):
            outcome = self.transport.outcome(self.refs[position])
        if outcome.ok:
            return None
        if outcome.failure is not None:
            report = report_of(outcome.failure, at=time.monotonic())
            return report if report.rank >= 0 else replace(report, rank=self.ranks[position])
        return self._of_lost(position, outcome)

    def _of_lost(self, position: int, outcome: Outcome) -> RankReport:
        lost = outcome.lost or Lost("unknown")
        return replace(
            self._report(position, "died"),
            message=lost.reason,
            exit=lost.exit,
            hint=lost.hint,
            at=time.monotonic(),
        )

    def intended(self, position: int) -> bool:
        """Whether the process of an ended rank was ended on purpose, by the owner of the group."""
        lost = self.transport.outcome(self.refs[position]).lost
        return lost is not None and lost.intended

    def stopped(self, position: int) -> RankReport:
        """The report of a rank that had not ended and was stopped."""
        return replace(
            self._report(position, "stopped"),
            victim=True,
            message="had not ended when the call failed, and was stopped",
            at=time.monotonic(),
        )

    def late(self, position: int, ended: bool) -> RankReport:
        """The report of a rank when the deadline passed."""
        return replace(
            self._report(position, "timeout"),
            state="finished" if ended else "running",
            since=time.monotonic() - self.started,
        )

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
            log_path=facts.log_paths[0] if facts.log_paths else None,
        )

    def error(self, *, init: bool = False) -> tuple[PhalanxError, list[int], bool]:
        """The error of a failed call, the positions still running, and whether a process is gone."""
        reports, pending = self.failure()
        died = any(report.kind == "died" for report in reports)
        if died and all(self.intended(self.ranks.index(r.rank)) for r in reports if r.kind == "died"):
            closed = GroupClosed(
                f"group {self.group!r} was closed by its owner before {self.method} ended", group=self.group
            )
            return closed, pending, died
        reports += [self.stopped(position) for position in pending]
        error = combine(self.group, self.method, reports, init=init)
        return error, pending, died

    def timeout(self, timeout: float | None) -> tuple[CallTimeout, list[int]]:
        """The error for a deadline that passed, and the positions that had not ended."""
        done, pending = self.transport.wait(self.refs, len(self.refs), 0)
        reports = [self.late(position, position in done) for position in range(len(self.refs))]
        error = combine(self.group, self.method, reports, timeout=timeout)
        if not isinstance(error, CallTimeout):
            raise error
        return error, pending

    def stream(self, limit: float | None) -> Iterator[tuple[int, Any]]:
        """(rank, output) as they come. Raises FetchFailed or NotReady."""
        pending = list(range(len(self.refs)))
        while pending:
            remaining = None if limit is None else max(0.0, limit - time.monotonic())
            done, rest = self.transport.wait([self.refs[p] for p in pending], 1, remaining)
            if not done:
                raise NotReady
            for position in (pending[index] for index in done):
                yield self.ranks[position], self.transport.fetch([self.refs[position]])[0]
            pending = [pending[index] for index in rest]


def settled_value(future: CallFuture[Any], watch: Watch, limit: float | None, target: Any) -> Any:
    """The value of a call whose ranks all returned: decoded straight into its place where rows are joined."""
    how = future.plan.gather.how
    outputs = watch.values(limit, Policy.VIEW if how == "rows" else Policy.PRIVATE)
    return gather(future.plan.gather, outputs, target)


__all__ = ["FetchFailed", "NotReady", "Watch", "settled_value"]
