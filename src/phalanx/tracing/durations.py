"""How long what took in a trace, in ns: on one rank, before it, between ranks. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from phalanx.tracing.events import STARTING, Call, Part, Trace, TrackKey
from phalanx.tracing.slices import results_there


def run_ns(part: Part) -> int | None:
    """How long the method itself took on a rank."""
    if part.started is None or part.finished is None:
        return None
    return part.finished - part.started


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


def awaited_ns(call: Call, index: int, calls: Mapping[int, Call]) -> int:
    """How long a rank waited for results of other calls."""
    there, received = results_there(call, index, calls), call.parts[index].received
    return 0 if there is None or received is None else there - received


def arguments_ns(call: Call, index: int, calls: Mapping[int, Call]) -> int:
    """How long a rank took to get its arguments once they were there."""
    part = call.parts[index]
    if part.started is None or part.received is None:
        return 0
    return part.started - part.received - awaited_ns(call, index, calls)


def waits_ns(call: Call, free: dict[TrackKey, int]) -> tuple[float, float]:
    """Mean ns over the ranks between the sending and the taking up: behind other calls, and on the way."""
    queued: list[float] = []
    way: list[float] = []
    for part in call.parts:
        key = call.key(part)
        if part.sent is not None and part.received is not None:
            behind = max(0, min(part.received, free.get(key, 0)) - part.sent)
            queued.append(behind)
            way.append(max(0, part.received - part.sent - behind))
        if part.returned is not None:
            free[key] = max(free.get(key, 0), part.returned)
    return (
        statistics.fmean(queued) if queued else 0.0,
        statistics.fmean(way) if way else 0.0,
    )


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
