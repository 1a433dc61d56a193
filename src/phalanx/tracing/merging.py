"""Merge of the events that the driver and the ranks recorded into a single trace.

Times are by the clock of the host that recorded them.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.tracing.events import Counter, RankSpan, Span, Trace, TracedCall, Track, TrackKey
from phalanx.tracing.spans import SpanLog, read_log

MOST_POINTS = 10_000


@dataclass(eq=False)
class TracedEpoch:
    """An epoch of a group: its tracks, and the content of its ranks' files.

    ``read(rank, offset)`` returns bytes of a rank's file; it is None before the processes are known, and after they
    ended.
    """

    group: str
    epoch: int
    tracks: list[Track] = field(default_factory=list)
    logs: dict[TrackKey, SpanLog] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    read: Callable[[int, int], bytes] | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def collect(self) -> None:
        """Read the ranks' files.

        A file that cannot be read becomes a note in the trace, not an error of the user's work.
        """
        with self._lock:
            for track in self.tracks if self.read is not None else ():
                raw, rank = b"", track.key.rank
                try:
                    while self.read is not None and (chunk := self.read(rank, len(raw))):
                        raw += chunk
                    self.logs[track.key] = read_log(raw.splitlines(), track.key)
                except FileNotFoundError:
                    pass  # no traced call reached the rank, or the rank logged that it cannot write
                except Exception as error:
                    note = f"The trace file of rank {rank} of {self.group} cannot be read: {error}"
                    self.notes += [note] if note not in self.notes else []

    def collect_last(self, seconds: float) -> None:
        """Read the ranks' files for the last time: their processes end now."""
        with self._lock:
            self.collect()
            self.read = None
            self.end()

    def end(self) -> None:
        """Close the tracks: the group enters its next epoch, or its processes end."""
        now = time.time_ns()
        self.tracks = [replace(track, closed=track.closed or now) for track in self.tracks]


def merge(epochs: Sequence[TracedEpoch], calls: Iterable[TracedCall], own: SpanLog, frame: Trace) -> Trace:
    """Merge calls and the events of the driver and the ranks into a single trace.

    ``frame`` has the beginning, the end and the title of the trace.
    """
    logs: dict[TrackKey | None, SpanLog] = {None: own}
    tracks: dict[TrackKey, Track] = {}
    for epoch in epochs:
        logs |= epoch.logs
        tracks |= {track.key: track for track in epoch.tracks}
    merged: list[TracedCall] = []
    for call in sorted(calls, key=lambda call: (call.began, call.id)):
        parts = tuple(_merged_parts(call, logs))
        error = call.error or next((part.error for part in parts if part.error), None)  # of an unread call
        merged.append(replace(call, sources=tuple(dict.fromkeys(call.sources)), parts=parts, error=error))
    # The file of a rank that stays through a resize is read in each epoch; a span belongs to the last epoch before it.
    opened = {key: track.opened or 0 for key, track in tracks.items()}
    found: dict[tuple[Any, ...], Span] = {}
    for span in _spans(logs, merged, frame):
        same = span.track and span.track._replace(epoch=0), span.call, span.began, span.name
        if same not in found or (span.track and opened.get(span.track, 0) <= span.began):
            found[same] = span
    spans = sorted(found.values(), key=lambda span: span.began)
    called = {(call.group, call.epoch) for call in merged}
    called |= {(span.track.group, span.track.epoch) for span in spans if span.track is not None}
    notes = [note for epoch in epochs if (epoch.group, epoch.epoch) in called for note in epoch.notes]
    if any(log.full for log in logs.values()):
        notes.append("A process reached the size limit of its trace file; its later events are missing.")
    return replace(
        frame,
        host=socket.gethostname(),
        pid=os.getpid(),
        tracks=tuple(track for key, track in tracks.items() if (key.group, key.epoch) in called),
        calls=tuple(merged),
        spans=tuple(spans),
        counters=tuple(_counters(logs, frame)),
        notes=tuple(notes),
    )


def _merged_parts(call: TracedCall, logs: Mapping[TrackKey | None, SpanLog]) -> Iterator[RankSpan]:
    """Yield the parts of a call, with the times and bytes that the ranks recorded.

    The clock of a rank's host can be behind the driver's, but no time of a rank is before its call.
    """
    for part in call.parts:
        log = logs.get(call.key(part))
        seen = (log.parts.get(call.number) if log else None) or part
        times = (seen.received, seen.started, seen.finished, seen.returned)
        received, started, finished, returned = (
            None if time is None else max(time, call.began) for time in times
        )
        yield RankSpan(  # replace() takes twice as long, and each call has a part per rank
            *(part.rank, received, started, finished, returned, part.fetched),
            *(seen.argument_bytes, seen.result_bytes, seen.error, seen.items),
        )


def _spans(
    logs: Mapping[TrackKey | None, SpanLog], calls: Iterable[TracedCall], frame: Trace
) -> Iterator[Span]:
    """Yield the spans within ``calls``, and the spans outside calls that began during the trace."""
    ids = {(call.group, call.epoch, call.number): call.id for call in calls}
    for key, log in logs.items():
        for span in log.spans:
            call = None if key is None or span.call is None else ids.get((key.group, key.epoch, span.call))
            if call is not None or (span.call is None and frame.began <= span.began <= frame.ended):
                yield replace(span, call=call)


def _counters(logs: Mapping[TrackKey | None, SpanLog], frame: Trace) -> Iterator[Counter]:
    """Yield the counters that have values during the trace, each value at the time from which it applies.

    Of more than ``MOST_POINTS`` values, evenly spaced values and the last are kept.
    """
    points: dict[str, dict[int, dict[str, float]]] = {}
    for log in logs.values():
        for name, at, values in log.counts:
            points.setdefault(name, {})[at] = values
    for name, by_time in sorted(points.items()):
        course = sorted(by_time.items())
        before = max(0, bisect_right(course, frame.began, key=lambda point: point[0]) - 1)
        seen = [(max(at, frame.began), values) for at, values in course[before:] if at <= frame.ended]
        if seen:
            kept = [*seen[: -1 : -(-len(seen) // MOST_POINTS)], seen[-1]]
            series = {key: tuple(values.get(key, 0.0) for _, values in kept) for key in kept[0][1]}
            yield Counter(name, tuple(at for at, _ in kept), series)
