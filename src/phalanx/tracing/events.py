"""The events of a trace: calls with the part of each rank, spans and counters, on tracks. Plain data.

All times are integers, in nanoseconds of the wall clock of the host that recorded them. None stands for an event that
did not happen or was not observed, such as the end of a call on a rank that was killed, or the arrival of a result that
was never fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phalanx.wire.messages import full_name

#: Name of the constructors of a group in a trace.
STARTING = "__init__"

#: Prefix of the name of a channel's counter, and the names of its two series.
CHANNEL, WAITING, OLDEST = "channel ", "items that wait", "age of the oldest, ms"


class TrackKey(NamedTuple):
    """Key of a track: a rank in an epoch of a group, which is a process."""

    group: str
    epoch: int
    rank: int


@dataclass(frozen=True, slots=True)
class Track:
    """The process of a rank. The trace has known it since ``opened``; it ended at ``closed``."""

    key: TrackKey
    host: str = ""
    node: str = ""
    pid: int = 0
    accelerators: tuple[str, ...] = ()
    opened: int | None = None
    closed: int | None = None

    @property
    def place(self) -> str:
        """Host and accelerators of the process, such as "node1 GPU 0,1" or "node1 CPU"."""
        return f"{self.host} GPU {','.join(self.accelerators)}" if self.accelerators else f"{self.host} CPU"


@dataclass(slots=True)
class RankSpan:
    """A rank's part of a call.

    ``received``: the rank began to handle the message; ``started``: the arguments were there, and the method began;
    ``finished``: the method ended; ``returned``: the output was encoded, and the rank was free; ``fetched``: the driver
    had the output. ``items`` is the number of streamed items.
    """

    rank: int
    received: int | None = None
    started: int | None = None
    finished: int | None = None
    returned: int | None = None
    fetched: int | None = None
    argument_bytes: int = 0
    result_bytes: int = 0
    error: str | None = None
    items: int | None = None


@dataclass(slots=True)
class TracedCall:
    """A call of a group. ``id`` is unique in the trace; ``number`` is the call's number on the ranks.

    ``began``: planning began; ``planned``: planning ended; ``sent``: the backend had all messages, with
    ``message_bytes`` bytes; ``asked``: a thread began to wait for the value; ``ended``: the thread had the value or the
    error. ``stored_bytes`` are bytes in the object store, besides messages. ``sources`` are ids of calls whose results
    are arguments by reference.
    """

    id: int
    group: str
    epoch: int
    role: str
    method: str
    began: int
    planned: int | None = None
    sent: int | None = None
    asked: int | None = None
    ended: int | None = None
    message_bytes: int = 0
    stored_bytes: int = 0
    error: str | None = None
    sources: tuple[int, ...] = ()
    parts: Sequence[RankSpan] = ()
    number: int = 0

    @property
    def name(self) -> str:
        """Role and method."""
        return full_name(self.role, self.method)

    @property
    def failed(self) -> bool:
        """True if it ended with an error. Cancelled calls and streams that were left did not fail."""
        return self.error is not None and not self.error.startswith(("CallCancelled", "Interrupted"))

    @property
    def returned(self) -> int | None:
        """Time when the last rank had returned; None if a rank has not."""
        times = [part.returned or 0 for part in self.parts]
        return max(times) if times and all(times) else None

    @property
    def fetched(self) -> int | None:
        """Time when the driver had the last output."""
        return max((part.fetched for part in self.parts if part.fetched is not None), default=None)

    @property
    def last_seen(self) -> int:
        """The latest known time of the call."""
        times = [self.began, self.planned, self.sent, self.ended]
        for part in self.parts:
            times += [part.received, part.started, part.finished, part.returned, part.fetched]
        return max(time or 0 for time in times)

    @property
    def result_bytes(self) -> int:
        """Bytes that the ranks returned."""
        return sum(part.result_bytes for part in self.parts)

    def key(self, part: RankSpan) -> TrackKey:
        """Return the key of a part's track."""
        return TrackKey(self.group, self.epoch, part.rank)


@dataclass(frozen=True, slots=True)
class Span:
    """A ``px.span`` of the user, on a rank's track or, if ``track`` is None, on the driver's.

    ``call`` is the id of the enclosing call; ``ended`` is None if the span was never left.
    """

    name: str
    began: int
    ended: int | None = None
    track: TrackKey | None = None
    call: int | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Counter:
    """Quantities over time, such as the items of a channel: ``values`` has a series each, with a value per ``at``."""

    name: str
    at: tuple[int, ...]
    values: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class Trace:
    """All events between ``began`` and ``ended``."""

    began: int
    ended: int
    host: str = ""
    pid: int = 0
    title: str = ""
    tracks: tuple[Track, ...] = ()
    calls: tuple[TracedCall, ...] = ()
    spans: tuple[Span, ...] = ()
    counters: tuple[Counter, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> tuple[Track, ...]:
        """The tracks of each group in its newest epoch."""
        newest = {key.group: key.epoch for key in sorted(track.key for track in self.tracks)}
        return tuple(track for track in self.tracks if track.key.epoch == newest[track.key.group])

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups, in the order of their first appearance."""
        names = [*(track.key.group for track in self.tracks), *(call.group for call in self.calls)]
        return tuple(dict.fromkeys(names))
