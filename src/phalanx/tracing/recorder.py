"""What the driver notes of a trace while it is on, and how that and the ranks' journals become one :class:`Trace`."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.tracing.clocks import bounds_of, corrected, corrected_span, estimate
from phalanx.tracing.counters import Points
from phalanx.tracing.events import Call, Clock, Counter, Part, Span, Trace, Track, TrackKey
from phalanx.tracing.span_writer import Reading, describe, plain

#: Parts of calls that a trace keeps; of more, the oldest calls are dropped.
LIMIT = 2_000_000


class Draft:
    """A call while it is under way: times are put down here, one attribute each."""

    __slots__ = (
        "__weakref__",
        "asked",
        "began",
        "encoded",
        "ended",
        "error",
        "fetched",
        "id",
        "joined",
        "message_bytes",
        "method",
        "number",
        "place",
        "planned",
        "ranks",
        "role",
        "sent",
        "sources",
        "stored_bytes",
    )

    def __init__(self, id_: int, place: Place, role: str, method: str, began: int) -> None:
        self.id = id_
        self.place = place
        self.role = role
        self.method = method
        self.began = began
        self.number = 0
        self.ranks: Sequence[int] = ()
        self.planned: int | None = None
        self.asked: int | None = None
        self.joined: int | None = None
        self.ended: int | None = None
        self.error: str | None = None
        self.stored_bytes = 0
        self.sources: list[int] = []
        self.encoded: list[int] = []
        self.sent: list[int] = []
        self.message_bytes: list[int] = []
        self.fetched: dict[int, int] = {}

    def composed(self, nbytes: int) -> None:
        """The message of the next rank is made, of so many bytes."""
        self.encoded.append(time.time_ns())
        self.message_bytes.append(nbytes)

    def posted(self) -> None:
        """It was sent."""
        self.sent.append(time.time_ns())

    def arrived(self, rank: int | None = None) -> None:
        """The output of a rank is here; None: of all."""
        now = time.time_ns()
        for position, one in enumerate(self.ranks):
            if rank is None or one == rank:
                self.fetched.setdefault(position, now)

    def end(self, error: BaseException | None) -> None:
        """Its value is there, or its error."""
        self.ended = time.time_ns()
        self.error = None if error is None else describe(error)

    def parts(self, reading: dict[TrackKey, Reading]) -> Iterable[Part]:
        """Its parts, with what the ranks' journals say of them."""
        for position, rank in enumerate(self.ranks):
            journal = reading.get(TrackKey(self.place.group, self.place.epoch, rank))
            seen = (journal.parts.get(self.number) if journal else None) or Part(rank)
            yield Part(  # not replace(), which takes twice as long: there are as many as ranks, for each call
                rank,
                _at(self.encoded, position),
                _at(self.sent, position),
                seen.received,
                seen.started,
                seen.finished,
                seen.returned,
                self.fetched.get(position),
                _at(self.message_bytes, position) or 0,
                seen.argument_bytes,
                seen.result_bytes,
                seen.error,
                seen.items,
            )


def _at(values: Sequence[int], position: int) -> int | None:
    return values[position] if position < len(values) else None


@dataclass
class Place:
    """One epoch of a group: its tracks, and what was read of its ranks' journals."""

    group: str
    epoch: int
    shares_clock: bool = False
    """Whether its ranks tell the time by the driver's own clock, wherever they are."""
    tracks: list[Track] = field(default_factory=list[Track])
    readings: dict[TrackKey, Reading] = field(default_factory=dict[TrackKey, Reading])
    notes: list[str] = field(default_factory=list[str])


class TraceRecorder:
    """Everything that this process notes while at least one trace is on. ``id`` names the ranks' journals."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.id = secrets.token_hex(4)
        self.dropped = 0
        self._limit = limit
        self._kept = 0
        self._ids = itertools.count(1)
        self._drafts: deque[Draft] = deque()
        self._spans: dict[int, Span] = {}
        self._points: dict[str, Points] = {}
        self._lock = threading.Lock()

    def call(self, place: Place, role: str, method: str, began: int) -> Draft:
        """Note a call that begins."""
        return Draft(next(self._ids), place, role, method, began)

    def keep(self, draft: Draft) -> None:
        """Keep a call whose ranks and number are known."""
        with self._lock:
            self._drafts.append(draft)
            self._kept += len(draft.ranks)
            while self._kept > self._limit and len(self._drafts) > 1:
                self._kept -= len(self._drafts.popleft().ranks)
                self.dropped += 1

    def enter(self, name: str, attributes: dict[str, Any]) -> int:
        """Note that a span of the driver begins."""
        number = next(self._ids)
        with self._lock:
            self._spans[number] = Span(name, time.time_ns(), attributes=plain(attributes))
            if len(self._spans) > self._limit:
                del self._spans[next(iter(self._spans))]
        return number

    def leave(self, number: int, error: BaseException | None) -> None:
        """Note that it ends."""
        with self._lock:
            found = self._spans.get(number)
            if found is not None:
                text = None if error is None else describe(error)
                self._spans[number] = replace(found, ended=time.time_ns(), error=text)

    def count(self, name: str, values: Mapping[str, float]) -> None:
        """Note how much there is of something from now on."""
        with self._lock:
            self._points.setdefault(name, Points()).add(time.time_ns(), values)

    def trace(self, places: Sequence[Place], began: int, ended: int, title: str = "") -> Trace:
        """What was recorded of the calls and spans that began between two times."""
        with self._lock:
            drafts, spans = list(self._drafts), list(self._spans.values())
            counted = [points.counter(name, began, ended) for name, points in self._points.items()]
        here = [draft for draft in drafts if began <= draft.began <= ended]
        seen = [span for span in spans if began <= span.began <= ended]
        made = assemble(places, here, seen, began, ended, title, self.dropped)
        return replace(made, counters=(*(one for one in counted if one is not None), *made.counters))


def assemble(
    places: Sequence[Place],
    drafts: Sequence[Draft],
    spans: Sequence[Span],
    began: int,
    ended: int,
    title: str = "",
    dropped: int = 0,
) -> Trace:
    """The driver's notes and the ranks' journals as one trace, with the clocks of other hosts corrected."""
    here = socket.gethostname()
    readings = {key: reading for place in places for key, reading in place.readings.items()}
    tracks = {track.key: track for place in places for track in place.tracks}
    parts = {draft.id: list(draft.parts(readings)) for draft in drafts}
    apart = [draft for draft in drafts if not draft.place.shares_clock]
    clocks = _clocks(apart, parts, tracks, here)
    offsets = {clock.host: clock.offset for clock in clocks}

    def offset(key: TrackKey) -> int:
        return offsets.get(tracks[key].host, 0) if key in tracks else 0

    calls = [
        _call(
            draft,
            [
                corrected(part, offset(TrackKey(draft.place.group, draft.place.epoch, part.rank)))
                for part in parts[draft.id]
            ],
        )
        for draft in drafts
    ]
    of_ranks = _spans_of_ranks(readings, drafts, offset, began, ended)
    called = {(call.group, call.epoch) for call in calls}
    called |= {(span.track.group, span.track.epoch) for span in of_ranks if span.track is not None}
    return Trace(
        began=began,
        ended=ended,
        host=here,
        pid=os.getpid(),
        title=title,
        tracks=tuple(track for key, track in tracks.items() if (key.group, key.epoch) in called),
        calls=tuple(sorted(calls, key=lambda call: (call.began, call.id))),
        spans=tuple(sorted([*spans, *of_ranks], key=lambda span: span.began)),
        clocks=clocks,
        counters=_counted(readings, offset, began, ended),
        notes=tuple(_notes(places, called, readings, dropped)),
    )


def _spans_of_ranks(
    readings: Mapping[TrackKey, Reading],
    drafts: Sequence[Draft],
    offset: Callable[[TrackKey], int],
    began: int,
    ended: int,
) -> list[Span]:
    """The spans that ranks noted within these calls, or within no call in this time."""
    numbers = {(draft.place.group, draft.place.epoch, draft.number): draft.id for draft in drafts}
    found: list[Span] = []
    for key, reading in readings.items():
        for span in reading.spans:
            call = numbers.get((key.group, key.epoch, span.call)) if span.call is not None else None
            moved = corrected_span(replace(span, call=call), offset(key))
            if call is not None or (span.call is None and began <= moved.began <= ended):
                found.append(moved)
    return found


def _notes(
    places: Sequence[Place],
    called: Collection[tuple[str, int]],
    readings: Mapping[TrackKey, Reading],
    dropped: int,
) -> Iterable[str]:
    """What a reader of the trace has to know."""
    for place in places:
        if (place.group, place.epoch) in called:
            yield from place.notes
    if dropped:
        yield f"The first {dropped} calls are left out: a trace keeps the {LIMIT:,} last parts of calls."
    if any(reading.full for reading in readings.values()):
        yield "A rank wrote more than it may; the rest of its part is left out."


def _counted(
    readings: Mapping[TrackKey, Reading], offset: Callable[[TrackKey], int], began: int, ended: int
) -> tuple[Counter, ...]:
    """What ranks counted, under the names that they gave it."""
    found: dict[str, Points] = {}
    for key, reading in readings.items():
        for name, at, values in reading.counts:
            found.setdefault(name, Points()).add(at - offset(key), values)
    made = (points.counter(name, began, ended) for name, points in sorted(found.items()))
    return tuple(one for one in made if one is not None)


def _call(draft: Draft, parts: Sequence[Part]) -> Call:
    return Call(
        id=draft.id,
        group=draft.place.group,
        epoch=draft.place.epoch,
        role=draft.role,
        method=draft.method,
        began=draft.began,
        planned=draft.planned,
        asked=draft.asked,
        joined=draft.joined,
        ended=draft.ended,
        stored_bytes=draft.stored_bytes,
        error=draft.error,
        sources=tuple(dict.fromkeys(draft.sources)),
        parts=tuple(parts),
    )


def _clocks(
    drafts: Sequence[Draft], parts: dict[int, list[Part]], tracks: dict[TrackKey, Track], here: str
) -> tuple[Clock, ...]:
    """The clocks of hosts that are not the driver's own."""
    by_host: dict[str, list[Part]] = {}
    for draft in drafts:
        for part in parts[draft.id]:
            track = tracks.get(TrackKey(draft.place.group, draft.place.epoch, part.rank))
            if track is not None and track.host != here:
                by_host.setdefault(track.host, []).append(part)
    found = (estimate(host, map(bounds_of, given)) for host, given in by_host.items())
    return tuple(clock for clock in found if clock is not None)
