"""The summary of a trace: a row per method, with times, bytes and the idle share of its ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.display.tables import Table
from phalanx.tracing.events import STARTING, Trace, TracedCall, TrackKey
from phalanx.tracing.slices import AWAITING, rank_slices

_MS = 1e6
_SHOWN_FAILURES = 8
_TIMES_AND_BYTES = ("p50 ms", "p95 ms", "bytes to ranks", "bytes from ranks")


@dataclass(frozen=True)
class Summary(Table):
    """The summary of a trace, with a row per method.

    The columns are the numbers of calls and failures, the 50th and 95th percentile of the time from the beginning of
    the plan to the value or the last return in ms, bytes in each direction over all calls, and the idle share of each
    rank in the group's newest epoch, in percent. The notes are important facts, such as lost parts of the trace.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as plain data."""
        return {"title": self.title, "methods": super().to_dict()["rows"], "notes": list(self.notes)}


def summarize(trace: Trace) -> Summary:
    """Return the summary of a trace."""
    count = sum(call.method != STARTING for call in trace.calls)
    where = f"{len(trace.groups)} groups on {len(trace.ranks)} ranks"
    title = f"{trace.title or 'trace'}: {(trace.ended - trace.began) / 1e9:.3g} s, {count} calls of {where}"
    idle = idle_shares(trace)
    methods: dict[str, list[TracedCall]] = {}
    for call in trace.calls:
        methods.setdefault(f"{call.group}.{call.name}", []).append(call)
    rows = [_row(name, calls, idle) for name, calls in methods.items()]
    rows.sort(key=lambda row: -(row[3] or 0.0) * row[1])  # by approximate total time, the longest first
    columns = ("call", "calls", "failed", *_TIMES_AND_BYTES, "idle % by rank")
    return Summary(title, columns, tuple(rows), (*trace.notes, *_failures(trace)))


def idle_shares(trace: Trace) -> dict[TrackKey, float]:
    """Return the share of time, in percent, that each rank of a group's newest epoch spent without a call.

    The time of a rank begins with the end of its constructor or, if the constructor was not traced, with its first
    traced call. Waiting for the results of other calls counts as idle.
    """
    starting = {call.id for call in trace.calls if call.method == STARTING}
    slices = rank_slices(trace)
    shares: dict[TrackKey, float] = {}
    for track in trace.ranks:
        busy: dict[int | None, tuple[int, int]] = {}
        began, ended = max(trace.began, track.opened or 0), min(track.closed or trace.ended, trace.ended)
        for one in slices[track.key]:
            if one.kind == "call" and one.call in starting:
                began = max(began, one.end)
            elif one.kind == "call":
                busy[one.call] = (one.start, one.end)
            elif one.kind == "phase" and one.name == AWAITING and one.call in busy:
                busy[one.call] = (one.end, busy[one.call][1])
        worked, reached = 0, began
        for start, end in sorted(busy.values()):
            worked += max(0, min(end, ended) - max(start, reached))
            reached = max(reached, end)
        if ended > began:
            shares[track.key] = _rounded(100.0 * (1 - worked / (ended - began)))
    return shares


def _row(name: str, calls: Sequence[TracedCall], idle: dict[TrackKey, float]) -> tuple[Any, ...]:
    ends = [(call.began, call.ended if call.ended is not None else call.returned) for call in calls]
    times = sorted((end - began) / _MS for began, end in ends if end is not None)
    return (
        name,
        len(calls),
        sum(call.failed for call in calls),
        _percentile(times, 50),
        _percentile(times, 95),
        sum(call.message_bytes + call.stored_bytes for call in calls),
        sum(call.result_bytes for call in calls),
        [f"{share:.0f}" for key, share in sorted(idle.items()) if key.group == calls[0].group],
    )


def _percentile(times: Sequence[float], percent: int) -> float | None:
    """Return the nearest-rank percentile of sorted times; None if there are none."""
    return _rounded(times[max(0, -(-len(times) * percent // 100) - 1)]) if times else None


def _failures(trace: Trace) -> list[str]:
    """Return a line for each of the first failures, and the number of further failures."""
    lines: list[str] = []
    for call in trace.calls:
        if call.failed:
            at = f"At {(call.began - trace.began) / 1e9:.3g} s, {call.group}.{call.name} failed"
            ranks = [f"{at} on rank {part.rank}: {part.error}" for part in call.parts if part.error]
            lines += ranks or [f"{at}: {call.error}"]
    more = len(lines) - _SHOWN_FAILURES
    return [*lines[:_SHOWN_FAILURES], *([f"{more} more failures are in the trace."] if more > 0 else [])]


def _rounded(value: float) -> float:
    """Round a number to four significant digits."""
    return float(f"{value:.4g}")
