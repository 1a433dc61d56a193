"""How long what took in a trace, in ns: on one rank, before it, between ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from phalanx.tracing.events import STARTING, Call, Trace, TrackKey
from phalanx.tracing.slices import results_there


def busy_ns(call: Call, index: int, calls: Mapping[int, Call], until: int) -> tuple[int, int] | None:
    """From when to when a rank was at work on its part of a call: not while it waits for results of other calls."""
    part = call.parts[index]
    if part.received is None:
        return None
    start = results_there(call, index, calls) or part.received
    if part.returned is None and part.started is None and start > part.received:
        return None
    return start, part.returned if part.returned is not None else max(until, start)


def parts_by_track(trace: Trace) -> dict[TrackKey, list[tuple[Call, int]]]:
    """The calls of each track, with the place of its part in them."""
    found: dict[TrackKey, list[tuple[Call, int]]] = {track.key: [] for track in trace.tracks}
    for call in trace.calls:
        for index, part in enumerate(call.parts):
            found.setdefault(call.key(part), []).append((call, index))
    return found


def ready_at(parts: Sequence[tuple[Call, int]]) -> int:
    """When the rank's constructor was over; before that it is not idle, but not there."""
    times = [call.parts[index].returned or 0 for call, index in parts if call.method == STARTING]
    return max(times, default=0)


def union(times: Iterable[tuple[int, int]]) -> int:
    """How much time stretches of it, as (start, end), cover together."""
    total, reached = 0, 0
    for start, end in sorted(times):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def clipped(times: Iterable[tuple[int, int]], windows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of stretches of time that lie in one of the windows."""
    parts = [(max(s, a), min(e, b)) for s, e in times for a, b in windows]
    return [(start, end) for start, end in parts if end > start]
