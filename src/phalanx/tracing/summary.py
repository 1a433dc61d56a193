"""The summary of a trace: one row per method, with times, bytes and the idle share of its ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.display.tables import Table
from phalanx.tracing.durations import busy_ns, clipped, parts_by_track, ready_at, union
from phalanx.tracing.events import STARTING, Call, Trace, TrackKey

_MS = 1e6
_SHOWN_FAILURES = 8
_COLUMNS = (
    "call",
    "calls",
    "failed",
    "p50 ms",
    "p95 ms",
    "bytes to ranks",
    "bytes from ranks",
    "idle % by rank",
)


@dataclass(frozen=True)
class Summary:
    """The summary of a trace; ``str()`` is for terminals, ``to_dict()`` for programs.

    Attributes:
        title: length of the trace, and numbers of calls, groups and ranks.
        table: one row per method: number of calls and of failures, the 50th and 95th percentile of the time from the
            plan to the value or the last return, bytes each way over all calls, and for each rank of the group the
            share of its time in which it was at no call, in percent.
        idle: that share by group, epoch and rank.
        notes: facts that a reader has to know, such as parts of the trace that were lost.
    """

    title: str
    table: Table
    idle: dict[TrackKey, float]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as plain data."""
        return {"title": self.title, "methods": self.table.to_dict()["rows"], "notes": list(self.notes)}

    def __str__(self) -> str:
        return "\n\n".join([self.title, str(self.table), *self.notes])

    def __rich__(self) -> Any:
        from rich.console import Group  # only where something is shown

        return Group(self.title, self.table.__rich__(), *self.notes)


def summarize(trace: Trace) -> Summary:
    """Return the summary of a trace."""
    calls = [call for call in trace.calls if call.method != STARTING]
    ranks = len({track.key for track in trace.tracks})
    seconds = (trace.ended - trace.began) / 1e9
    where = f"{len(trace.groups)} groups on {ranks} ranks"
    title = f"{trace.title or 'trace'}: {seconds:.3g} s, {len(calls)} calls of {where}"
    idle = idle_shares(trace)
    rows = [_row(name, found, idle) for name, found in _by_method(trace.calls).items()]
    rows.sort(key=lambda row: -(row[3] or 0.0) * row[1])
    table = Table("Calls, from the plan to the value or the last return", _COLUMNS, tuple(rows))
    return Summary(title, table, idle, (*trace.notes, *_clock_notes(trace), *_failures(trace)))


def idle_shares(trace: Trace) -> dict[TrackKey, float]:
    """Return the share of its time, in percent, in which each rank was at no call, from its constructor's end on.

    Time in which a rank waits for the results of other calls counts as idle.
    """
    calls = {call.id: call for call in trace.calls}
    parts = parts_by_track(trace)
    found: dict[TrackKey, float] = {}
    for track in trace.tracks:
        start = max(trace.began, track.opened or trace.began, ready_at(parts[track.key]))
        window = (start, max(start, min(track.closed or trace.ended, trace.ended)))
        busy = [
            time
            for call, index in parts[track.key]
            if call.method != STARTING and (time := busy_ns(call, index, calls, trace.ended)) is not None
        ]
        if window[1] > window[0]:
            worked = union(clipped(busy, [window]))
            found[track.key] = _rounded(100.0 * (1 - worked / (window[1] - window[0])))
    return found


def _by_method(calls: Iterable[Call]) -> dict[str, list[Call]]:
    found: dict[str, list[Call]] = {}
    for call in calls:
        found.setdefault(f"{call.group}.{call.name}", []).append(call)
    return found


def _row(name: str, calls: Sequence[Call], idle: dict[TrackKey, float]) -> tuple[Any, ...]:
    ends = [(call.began, call.ended if call.ended is not None else call.returned) for call in calls]
    times = sorted((end - began) / _MS for began, end in ends if end is not None)
    parts = [part for call in calls for part in call.parts]
    last = max(call.epoch for call in calls)
    shares = [
        share for key, share in sorted(idle.items()) if (key.group, key.epoch) == (calls[0].group, last)
    ]
    return (
        name,
        len(calls),
        sum(call.error is not None for call in calls),
        _percentile(times, 50),
        _percentile(times, 95),
        sum(part.message_bytes for part in parts) + sum(call.stored_bytes for call in calls),
        sum(part.result_bytes for part in parts),
        [f"{share:.0f}" for share in shares],
    )


def _percentile(times: Sequence[float], percent: int) -> float | None:
    """Return the nearest-rank percentile of sorted times; None if there are none."""
    return _rounded(times[max(0, -(-len(times) * percent // 100) - 1)]) if times else None


def _clock_notes(trace: Trace) -> tuple[str, ...]:
    return tuple(
        f"The clock of {clock.host} is {clock.offset / _MS:+.3f} ms from the driver's (± "
        f"{clock.uncertainty / _MS:.3f} ms); times of its ranks are corrected by that."
        for clock in trace.clocks
    )


def _failures(trace: Trace) -> list[str]:
    """Return a line for each of the first failures."""
    lines: list[str] = []
    for call in trace.calls:
        at = f"At {(call.began - trace.began) / 1e9:.3g} s, {call.group}.{call.name}"
        lines += [f"{at} failed on rank {part.rank}: {part.error}" for part in call.parts if part.error]
        if call.error is not None and not any(part.error for part in call.parts):
            lines.append(f"{at} failed: {call.error}")
    more = len(lines) - _SHOWN_FAILURES
    return [*lines[:_SHOWN_FAILURES], *([f"{more} more failures are in the trace."] if more > 0 else [])]


def _rounded(value: float) -> float:
    """Return a number of four digits."""
    return float(f"{value:.4g}")
