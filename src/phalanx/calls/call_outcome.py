"""The outcome of a call, decided from observations of its ranks: no IO, no clock, no threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.collect.failures import combine, with_victims
from phalanx.collect.message import render
from phalanx.errors import CallCancelled, CallTimeout, GroupClosed, RankReport


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
    """Decide the outcome of a call from an observation."""
    if seen.why == "cancelled":
        return _cancelled(seen)
    if seen.why == "failed":
        return _failed(seen)
    if not seen.pending:
        return CallOutcome(over=False)  # all ranks have ended since the observation
    error = combine(seen.group, seen.method, with_victims(seen.reports), timeout=seen.waited, init=seen.init)
    if seen.why == "impatient":
        return CallOutcome(error, over=not isinstance(error, CallTimeout))
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
