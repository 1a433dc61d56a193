"""What a trace is made of: calls, the share of each rank in them, spans, and the tracks that they lie on. Values only.

All times are whole nanoseconds of the driver's wall clock. None stands for what has not happened, or what nobody
saw: the end of a call on a rank that was killed in it, the arrival of a result that was never asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phalanx.wire.messages import full_name

#: Name under which the constructors of a group stand in a trace.
STARTING = "__init__"


class TrackKey(NamedTuple):
    """One rank of one epoch of a group: a process."""

    group: str
    epoch: int
    rank: int


@dataclass(frozen=True, slots=True)
class Track:
    """Where a rank ran, and from when to when it was there."""

    key: TrackKey
    host: str = ""
    node: str = ""
    pid: int = 0
    accelerators: tuple[str, ...] = ()
    opened: int | None = None
    closed: int | None = None

    @property
    def place(self) -> str:
        """The accelerator that it had, or its process."""
        return f"{self.host} GPU {','.join(self.accelerators)}" if self.accelerators else f"{self.host} CPU"


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's share of a call.

    ``encoded``: its message was ready; ``sent``: the backend had it; ``received``: the rank took it up; ``started``:
    its arguments were there, the method began; ``finished``: the method was over; ``returned``: its output was
    encoded, the rank was free; ``fetched``: the driver had the output. ``items`` is how many it yielded, where its
    items were to come one by one.
    """

    rank: int
    encoded: int | None = None
    sent: int | None = None
    received: int | None = None
    started: int | None = None
    finished: int | None = None
    returned: int | None = None
    fetched: int | None = None
    message_bytes: int = 0
    argument_bytes: int = 0
    result_bytes: int = 0
    error: str | None = None
    items: int | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a group. ``asked`` is when somebody began to wait for its value, ``ended`` when they had it or its
    error. ``sources`` are the ids of calls whose results are its arguments by reference."""

    id: int
    group: str
    epoch: int
    role: str
    method: str
    began: int
    planned: int | None = None
    asked: int | None = None
    joined: int | None = None
    ended: int | None = None
    stored_bytes: int = 0
    error: str | None = None
    sources: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()

    @property
    def name(self) -> str:
        """Role and method."""
        return full_name(self.role, self.method)

    @property
    def sent(self) -> int | None:
        """When the last message was sent."""
        return max((part.sent for part in self.parts if part.sent is not None), default=None)

    @property
    def returned(self) -> int | None:
        """When the last rank was through; None while one is not."""
        times = [part.returned for part in self.parts]
        known = [time for time in times if time is not None]
        return max(known) if known and len(known) == len(times) else None

    @property
    def fetched(self) -> int | None:
        """When the last output was in the driver's hands."""
        return max((part.fetched for part in self.parts if part.fetched is not None), default=None)

    @property
    def last_seen(self) -> int:
        """The latest time that is known of it."""
        own = [self.began, self.planned, self.joined, self.ended]
        found = [time for part in self.parts for time in _times(part)]
        return max(time for time in [*own, *found] if time is not None)

    def key(self, part: Part) -> TrackKey:
        """The track on which a part of it lies."""
        return TrackKey(self.group, self.epoch, part.rank)


def _times(part: Part) -> tuple[int | None, ...]:
    return (part.encoded, part.sent, part.received, part.started, part.finished, part.returned, part.fetched)


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time that the user named, on a rank's track or (``track`` None) on the driver's.

    ``call`` is the id of the call in which it lies; ``ended`` is None for one that was never left.
    """

    name: str
    began: int
    ended: int | None = None
    track: TrackKey | None = None
    call: int | None = None
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Counter:
    """How much there was of something, from each time in ``at`` on: what waits in a channel, what an engine draws.

    ``values`` has a series for each thing that is counted, as long as ``at``.
    """

    name: str
    at: tuple[int, ...]
    values: dict[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Clock:
    """How far a host's clock was found to be ahead of the driver's, and by how much that may be wrong, in ns."""

    host: str
    offset: int
    uncertainty: int


@dataclass(frozen=True)
class Trace:
    """Everything that was recorded between ``began`` and ``ended``."""

    began: int
    ended: int
    host: str = ""
    pid: int = 0
    title: str = ""
    tracks: tuple[Track, ...] = ()
    calls: tuple[Call, ...] = ()
    spans: tuple[Span, ...] = ()
    counters: tuple[Counter, ...] = ()
    clocks: tuple[Clock, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups in the order in which they first appear."""
        return tuple(
            dict.fromkeys([*(track.key.group for track in self.tracks), *(call.group for call in self.calls)])
        )
