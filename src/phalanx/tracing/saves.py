"""What a trace says of saves and loads: bytes, seconds and rate by rank. Pure."""

from __future__ import annotations

from typing import Any

from phalanx.display.byte_format import size
from phalanx.display.tables import Table
from phalanx.tracing.events import Span, Trace

__all__ = ["saves_table", "span_attributes"]

_BYTES, _ROLE = "bytes of a save", "role"


def span_attributes(role: str, nbytes: int) -> dict[str, Any]:
    """Of the span in which a rank writes or reads its part of a role."""
    return {_ROLE: role, _BYTES: nbytes}


def saves_table(trace: Trace) -> Table:
    """A row for each rank's part that was written or read."""
    rows = [_row(span) for span in trace.spans if _BYTES in span.attributes]
    return Table(
        "Saves and loads, by rank", ("what", "role", "rank", "bytes", "ms", "per second"), tuple(rows)
    )


def _row(span: Span) -> tuple[Any, ...]:
    track = span.track
    rank = "driver" if track is None else f"{track.group} rank {track.rank}"
    took = None if span.ended is None else (span.ended - span.began) / 1e9
    nbytes = int(span.attributes[_BYTES])
    rate = f"{size(int(nbytes / took))}/s" if took else None
    ms = None if took is None else round(took * 1e3, 2)
    return (span.name, span.attributes[_ROLE], rank, size(nbytes), ms, rate)
