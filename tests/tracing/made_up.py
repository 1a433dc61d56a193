"""A trace made by hand: two ranks and three calls. One call failed, and one result was passed by reference."""

from __future__ import annotations

from phalanx.tracing.events import RankSpan, Span, Trace, TracedCall, Track, TrackKey

ZERO = 1_700_000_000_000_000_000
MS = 1_000_000


def at(ms: float) -> int:
    return ZERO + int(ms * MS)


def part(rank: int, *times: float | None, **more: object) -> RankSpan:
    """Return a part. Times: received, started, finished, returned, fetched; in ms since the start."""
    return RankSpan(rank, *(None if ms is None else at(ms) for ms in times), **more)  # type: ignore[arg-type]


def key(rank: int, group: str = "policy", epoch: int = 0) -> TrackKey:
    return TrackKey(group, epoch, rank)


def track(rank: int, host: str = "a", accelerator: str = "") -> Track:
    ids = (accelerator,) if accelerator else ()
    return Track(key(rank), host, "node", 100 + rank, ids, at(0), None)


def call(number: int, role: str, method: str, *times: float | None, **more: object) -> TracedCall:
    """Return a call. Times: began, planned, sent, asked, ended; in ms since the start of the trace."""
    began, *marks = (None if ms is None else at(ms) for ms in times)
    names = ("planned", "sent", "asked", "ended")
    more.update(zip(names, marks, strict=True))
    return TracedCall(number, "policy", 0, role, method, began, **more)  # type: ignore[arg-type]


#: In generate, rank 1 is slower. update gets its result by reference. fail raises on rank 0.
GENERATE = call(
    *(1, "actor", "generate", 0, 1, 3, 4, 32),
    message_bytes=200,
    stored_bytes=500,
    parts=(
        part(0, 3, 5, 15, 16, 30, argument_bytes=50, result_bytes=40),
        part(1, 4, 6, 26, 28, 30, argument_bytes=50, result_bytes=60),
    ),
)
UPDATE = call(
    *(2, "actor", "update", 3.5, 3.6, 3.9, 3.9, 62),
    message_bytes=20,
    sources=(1,),
    parts=(part(0, 17, 20, 40, 42, 60), part(1, 29, 30, 55, 56, 60)),
)
FAIL = call(
    *(3, "", "fail", 70, 70.1, 70.4, 70.5, 90),
    error="RemoteCallError: rank 0",
    parts=(part(0, 71, 72, 80, 80, None, error="ValueError: no"), part(1, 71, 72, None, None, None)),
)
SPAN = Span("backward", at(22), at(35), key(0), 2, {"rows": 128})
DRIVER_SPAN = Span("load", at(63), at(69), None, None, {})
TRACE = Trace(
    began=ZERO,
    ended=at(100),
    host="a",
    pid=7,
    title="made up",
    tracks=(track(0, accelerator="0"), track(1, accelerator="1")),
    calls=(GENERATE, UPDATE, FAIL),
    spans=(SPAN, DRIVER_SPAN),
    notes=("a note",),
)
