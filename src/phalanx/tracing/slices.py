"""Slices of a trace for viewers: nested or disjoint intervals on lanes. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from phalanx.tracing.events import STARTING, RankSpan, Span, Trace, TracedCall, TrackKey

#: The phase in which a rank waits for a result that it gets by reference.
AWAITING = "await results"


@dataclass(frozen=True, slots=True)
class Slice:
    """A named interval on a lane of a track, in ns.

    ``kind``: "call" (a call on the driver, or a rank's part of it), "phase" of a call, or "span". ``depth`` counts
    the slices around it. ``open``: its end was not observed, and it is drawn to the end of the trace.
    """

    name: str
    start: int
    end: int
    kind: str
    call: int | None = None
    open: bool = False
    error: str | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    lane: int = 0
    depth: int = 0


class DrawnTrack(NamedTuple):
    """Slices of a rank, or of the driver: its calls of a group (``key`` is the group's name), or its spans ("")."""

    key: TrackKey | str
    group: str
    label: str
    place: str
    pid: int
    slices: list[Slice]


def drawn_tracks(trace: Trace) -> list[DrawnTrack]:
    """Return the tracks from top to bottom: the driver's, then the tracks of each group by epoch and rank."""
    driver = driver_slices(trace).items()
    drawn = [DrawnTrack(name, "driver", name or "spans", "", 0, slices) for name, slices in driver]
    ranks = rank_slices(trace)
    tracks = {track.key: track for track in trace.tracks}
    order = {group: number for number, group in enumerate(trace.groups)}
    for key in sorted(ranks, key=lambda key: (order.get(key.group, 0), key.epoch, key.rank)):
        group = f"{key.group} (epoch {key.epoch})" if key.epoch else key.group
        place, pid = (tracks[key].place, tracks[key].pid) if key in tracks else ("", 0)
        drawn.append(DrawnTrack(key, group, f"rank {key.rank}", place, pid, ranks[key]))
    return drawn


def driver_slices(trace: Trace) -> dict[str, list[Slice]]:
    """Return the slices on the driver: the calls of each group by the group's name, and the driver's spans by ""."""
    slices = {
        group: place([_driver_family(call, trace.ended) for call in trace.calls if call.group == group])
        for group in trace.groups
    }
    spans = [[_span_slice(span, trace.ended)] for span in trace.spans if span.track is None]
    return slices | ({"": place(spans)} if spans else {})


def rank_slices(trace: Trace) -> dict[TrackKey, list[Slice]]:
    """Return the slices of each rank: its parts of calls with their phases and spans, and spans outside calls."""
    families: dict[TrackKey, list[list[Slice]]] = {track.key: [] for track in trace.tracks}
    family_of_call: dict[tuple[TrackKey, int | None], list[Slice]] = {}
    calls = {call.id: call for call in trace.calls}
    for call in trace.calls:
        for index, part in enumerate(call.parts):
            if part.received is not None:
                family = _rank_family(call, index, part.received, calls, trace.ended)
                families.setdefault(call.key(part), []).append(family)
                family_of_call[call.key(part), call.id] = family
    for span in trace.spans:
        if span.track is None:
            continue
        inner = _span_slice(span, trace.ended)
        around = family_of_call.get((span.track, span.call))
        if around is None:
            families.setdefault(span.track, []).append([inner])
        else:
            start = min(max(inner.start, around[0].start), around[0].end)
            around.append(replace(inner, start=start, end=max(start, min(inner.end, around[0].end))))
    return {key: place(of_rank) for key, of_rank in families.items()}


def _driver_family(call: TracedCall, until: int) -> list[Slice]:
    """Return the slices of a call on the driver and of its phases: plan, send, wait, fetch, join or read a stream."""
    is_open = call.ended is None and call.returned is None
    end = call.ended if call.ended is not None else until if is_open else call.last_seen
    root = Slice(call.name, call.began, max(end, call.began), "call", call.id, is_open, call.error)
    marks = [("plan", call.planned), ("start processes" if call.method == STARTING else "send", call.sent)]
    if call.asked is not None:
        returned = None if call.returned is None else max(call.returned, call.asked)
        if call.fetched is not None and returned is not None:
            returned = min(returned, call.fetched)
        marks += [("in the background", None if call.sent is None else call.asked), ("wait", returned)]
        is_joined = call.error is None and call.fetched is not None
        marks += [("fetch", call.fetched), ("join or read" if is_joined else "wait", call.ended)]
    return _family(root, marks)


def _rank_family(
    call: TracedCall, index: int, received: int, calls: Mapping[int, TracedCall], until: int
) -> list[Slice]:
    """Return the slices of a rank's part of a call and of its phases: wait for other results, arguments, return."""
    part = call.parts[index]
    known = [time for time in (part.returned, part.finished, part.started) if time is not None]
    end = max(received, *known[:1], until if part.returned is None else 0)
    root = Slice(call.name, received, end, "call", call.id, part.returned is None, part.error)
    marks = [
        (AWAITING, _results_arrival(call, index, calls)),
        ("arguments", part.started),
        ("", part.finished),
        ("return", None if part.finished is None else part.returned),
    ]
    return _family(root, marks)


def _family(root: Slice, marks: Iterable[tuple[str, int | None]]) -> list[Slice]:
    """Return ``root`` and its phases, each from the previous known mark to its own; unnamed phases are left out."""
    family, at = [root], root.start
    for name, mark in marks:
        end = at if mark is None else min(mark, root.end)
        if end > at:
            family += [Slice(name, at, end, "phase", root.call)] if name else []
            at = end
    return family


def _span_slice(span: Span, until: int) -> Slice:
    end = max(span.began, until if span.ended is None else span.ended)
    attributes = dict(span.attributes)
    return Slice(span.name, span.began, end, "span", span.call, span.ended is None, span.error, attributes)


def sources_of(
    call: TracedCall, index: int, calls: Mapping[int, TracedCall]
) -> Iterator[tuple[TracedCall, RankSpan]]:
    """Yield each source of a call, with the part from which an arrow goes to the call's part at ``index``.

    It is the part at the same index if both calls have equally many ranks, else the part that returned last.
    """
    for number in call.sources:
        source = calls.get(number)
        if source is not None and source.parts:
            last = max(source.parts, key=lambda part: part.returned or 0)
            yield source, source.parts[index] if len(source.parts) == len(call.parts) else last


def _results_arrival(call: TracedCall, index: int, calls: Mapping[int, TracedCall]) -> int | None:
    """Return the time when the results that a part gets by reference were there; None if it did not wait for them."""
    part = call.parts[index]
    times = [source.returned for _, source in sources_of(call, index, calls) if source.returned is not None]
    if part.received is None or not times or max(times) <= part.received:
        return None
    return max(times) if part.started is None else min(max(times), part.started)


def place(families: Iterable[Sequence[Slice]]) -> list[Slice]:
    """Return the slices of families with lanes and depths, by start; the first slice of a family spans the others.

    A slice gets the lowest lane, from the lane of its family's first slice on, that is free or where a slice of the
    family encloses it. So slices of a lane are nested or disjoint.
    """
    numbered = (
        (one.start, -one.end, number, index, one)
        for number, family in enumerate(families)
        for index, one in enumerate(family)
    )
    # For each lane, the slices that are open at the time with their families, outermost first.
    lanes: list[list[tuple[int, Slice]]] = []
    lowest: dict[int, int] = {}
    placed: list[Slice] = []
    for start, _, number, _, one in sorted(numbered):
        for lane in itertools.count(lowest.get(number, 0)):
            lanes += [[]] if lane == len(lanes) else []
            stack = lanes[lane]
            while stack and stack[-1][1].end <= start:
                stack.pop()
            if not stack or (stack[-1][0] == number and one.end <= stack[-1][1].end):
                lowest.setdefault(number, lane)
                placed.append(replace(one, lane=lane, depth=len(stack)))
                stack.append((number, one))
                break
    return placed
