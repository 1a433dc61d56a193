"""From events to what is drawn: slices that nest, on lanes that never overlap. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.tracing.events import STARTING, Call, Part, Span, Trace, TrackKey

#: The phase in which a rank waits for a result that it gets by reference and that is not there yet.
AWAITING = "await results"


@dataclass(frozen=True, slots=True)
class Slice:
    """A named stretch of time on a lane of a track, in ns.

    ``kind``: "call" (a call on the driver, or a rank's share of one), "phase" of a call, or "span". ``depth`` counts
    the slices around it. ``open`` says that its end was never seen: it is drawn to where the trace ends. ``part`` is
    the rank whose share it is.
    """

    name: str
    start: int
    end: int
    kind: str
    lane: int = 0
    depth: int = 0
    call: int | None = None
    rank: int | None = None
    open: bool = False
    error: str | None = None
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def duration(self) -> int:
        return self.end - self.start


def driver_slices(trace: Trace) -> dict[str, list[Slice]]:
    """The driver's tracks by name: one for the calls of each group, one for its own spans where there are any."""
    made: dict[str, list[Slice]] = {}
    for group in trace.groups:
        found = [_of_call(call, trace.ended) for call in trace.calls if call.group == group]
        made[group] = place(found)
    spans = [[_of_span(span, trace.ended)] for span in trace.spans if span.track is None]
    if spans:
        made["spans"] = place(spans)
    return made


def rank_slices(trace: Trace) -> dict[TrackKey, list[Slice]]:
    """What each rank did: its share of each call with the phases and spans in it."""
    families: dict[TrackKey, list[list[Slice]]] = {track.key: [] for track in trace.tracks}
    of_call: dict[tuple[TrackKey, int], list[Slice]] = {}
    calls = {call.id: call for call in trace.calls}
    for call in trace.calls:
        for index, part in enumerate(call.parts):
            family = _of_part(call, index, calls, trace.ended)
            if family:
                families.setdefault(call.key(part), []).append(family)
                of_call[call.key(part), call.id] = family
    for span in trace.spans:
        if span.track is None:
            continue
        around = of_call.get((span.track, span.call)) if span.call is not None else None
        made = _of_span(span, trace.ended)
        if around is not None:
            around.append(_within(made, around[0]))
        else:
            families.setdefault(span.track, []).append([made])
    return {key: place(found) for key, found in families.items()}


def _of_call(call: Call, until: int) -> list[Slice]:
    """A call as the driver saw it: plan, send, wait, fetch, join."""
    end = call.ended if call.ended is not None else (call.last_seen if call.returned else until)
    whole = Slice(
        call.name,
        call.began,
        max(end, call.began),
        "call",
        call=call.id,
        open=call.ended is None and call.returned is None,
        error=call.error,
    )
    return [whole, *_phases_of_call(call, whole)]


def _phases_of_call(call: Call, whole: Slice) -> Iterator[Slice]:
    sending = "start processes" if call.method == STARTING else "send"
    marks: list[tuple[str, int | None]] = [("plan", call.planned), (sending, call.sent)]
    if call.asked is not None:
        idle = call.asked if call.sent is not None and call.asked > call.sent else None
        fetched = call.fetched
        returned = None if call.returned is None else max(call.returned, call.asked)
        if fetched is not None and returned is not None:
            returned = min(returned, fetched)
        marks += [("in the background", idle), ("wait", returned), ("fetch", fetched), ("join", call.joined)]
    at = call.began
    for name, end in marks:
        if end is None or end <= at:
            continue
        yield Slice(name, at, min(end, whole.end), "phase", depth=1, call=call.id)
        at = min(end, whole.end)
    if at < whole.end and call.ended is not None and call.joined is None and call.asked is not None:
        yield Slice("wait", at, whole.end, "phase", depth=1, call=call.id)


def _of_part(call: Call, index: int, calls: Mapping[int, Call], until: int) -> list[Slice]:
    """A rank's share: waiting for results of other calls, arguments, the method itself, return."""
    part = call.parts[index]
    if part.received is None:
        return []
    ends = [part.returned, part.finished, part.started]
    known = next((end for end in ends if end is not None), part.received)
    is_open = part.returned is None
    end = max(until, known) if is_open else known
    whole = Slice(
        call.name,
        part.received,
        max(end, part.received),
        "call",
        call=call.id,
        rank=part.rank,
        open=is_open,
        error=part.error,
    )
    family = [whole]
    there = results_there(call, index, calls)
    marks = (
        (AWAITING, part.received, there),
        ("arguments", part.received if there is None else there, part.started),
        ("return", part.finished, part.returned),
    )
    for name, start, stop in marks:
        if start is not None and stop is not None and stop > start:
            family.append(
                Slice(name, start, min(stop, whole.end), "phase", depth=1, call=call.id, rank=part.rank)
            )
    return family


def _of_span(span: Span, until: int) -> Slice:
    end = span.ended if span.ended is not None else max(until, span.began)
    return Slice(
        span.name,
        span.began,
        max(end, span.began),
        "span",
        call=span.call,
        rank=span.track.rank if span.track else None,
        open=span.ended is None,
        error=span.error,
        attributes=dict(span.attributes),
    )


def _within(inner: Slice, outer: Slice) -> Slice:
    """The slice cut to what lies in the other."""
    start = min(max(inner.start, outer.start), outer.end)
    return replace(inner, start=start, end=max(start, min(inner.end, outer.end)))


def sources_of(call: Call, index: int, calls: Mapping[int, Call]) -> Iterator[tuple[Call, Part]]:
    """Which part of each source call the part at ``index`` is drawn to come from.

    That at the same place where both calls have as many ranks; else the one that returned last.
    """
    for number in call.sources:
        source = calls.get(number)
        if source is None or not source.parts:
            continue
        if len(source.parts) == len(call.parts):
            yield source, source.parts[index]
        else:
            yield source, max(source.parts, key=lambda part: part.returned or 0)


def results_there(call: Call, index: int, calls: Mapping[int, Call]) -> int | None:
    """When the results that the part at ``index`` gets by reference were there; None where it did not wait for them."""
    part = call.parts[index]
    times = [source.returned for _, source in sources_of(call, index, calls) if source.returned is not None]
    if part.received is None or not times or max(times) <= part.received:
        return None
    return max(times) if part.started is None else min(max(times), part.started)


def place(families: Iterable[Sequence[Slice]]) -> list[Slice]:
    """Lanes and depths for families of slices: the first of a family spans the others.

    A family goes to the lowest lane that is free in its time, so that a lane's slices either nest or lie apart.
    Within a family, slices that overlap without nesting (threads, tasks) get lanes of their own.
    """
    free: list[int] = []  # by lane, the end of what lies there
    placed: list[Slice] = []
    for family in sorted(families, key=lambda one: (one[0].start, -one[0].end)):
        inner, height = _nested(family)
        lane = _lowest(free, family[0].start, height)
        free += [0] * (lane + height - len(free))
        for offset in range(height):
            free[lane + offset] = max(free[lane + offset], family[0].end)
        placed += [_at(one, one.lane + lane, one.depth) for one in inner]
    return placed


def _at(one: Slice, lane: int, depth: int) -> Slice:
    """The slice on that lane, at that depth."""
    return one if one.lane == lane and one.depth == depth else replace(one, lane=lane, depth=depth)


def _lowest(free: list[int], start: int, height: int) -> int:
    lane = 0
    while any(end > start for end in free[lane : lane + height]):
        lane += 1
    return lane


def _nested(family: Sequence[Slice]) -> tuple[list[Slice], int]:
    """The slices of a family with lane and depth, and how many lanes they take."""
    first, *rest = family
    lanes: list[list[Slice]] = [[first]]  # by lane, the slices that are open at the time, outermost first
    placed = [first]
    for one in sorted(rest, key=lambda slice_: (slice_.start, -slice_.end)):
        for lane, stack in enumerate(lanes):
            while stack and stack[-1].end <= one.start and stack[-1] is not first:
                stack.pop()
            if not stack or one.end <= stack[-1].end:
                placed.append(_at(one, lane, len(stack)))
                stack.append(one)
                break
        else:
            placed.append(_at(one, len(lanes), 0))
            lanes.append([one])
    return placed, len(lanes)
