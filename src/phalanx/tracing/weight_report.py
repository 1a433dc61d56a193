"""What a trace says of weights that went from role to role: bytes, seconds and rate by pair of ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.display.byte_format import size
from phalanx.display.tables import Table
from phalanx.tracing.events import Span, Trace

__all__ = ["span_attributes", "weights_table"]

_VERSION, _MOVER, _FROM = "weights version", "mover", "bytes from rank "


def span_attributes(version: int, mover: str, nbytes: Mapping[int, int]) -> dict[str, Any]:
    """Of the span in which a target rank receives: the version, what carries it, and bytes by source rank."""
    return {
        _VERSION: version,
        _MOVER: mover,
        **{f"{_FROM}{source}": count for source, count in nbytes.items()},
    }


def weights_table(trace: Trace) -> Table:
    """A row for each version, pair of ranks and mover. Sources of one mover share the time."""
    rows = [row for span in trace.spans if _VERSION in span.attributes for row in _rows(span)]
    columns = ("weights", "version", "from rank", "to", "mover", "bytes", "ms", "per second")
    return Table("Weights, by pair of ranks", columns, tuple(rows))


def _rows(span: Span) -> list[tuple[Any, ...]]:
    track = span.track
    to = "driver" if track is None else f"{track.group} rank {track.rank}"
    took = None if span.ended is None else (span.ended - span.began) / 1e9
    rows: list[tuple[Any, ...]] = []
    for name, count in span.attributes.items():
        if not name.startswith(_FROM):
            continue
        rate = f"{size(int(count / took))}/s" if took else None
        ms = None if took is None else round(took * 1e3, 2)
        source = int(name.removeprefix(_FROM))
        label = span.name.removeprefix("weights ").strip("'")
        rows.append(
            (
                label,
                span.attributes[_VERSION],
                source,
                to,
                span.attributes[_MOVER],
                size(int(count)),
                ms,
                rate,
            )
        )
    return rows
