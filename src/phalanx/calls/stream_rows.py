"""Rows that ranks yield individually, as `(index in its shard, result)`, put at their places in the call. Pure.

A rank yields -> `calls/streams.py` -> `StreamedRows.receive` -> `(index in the call, result)` to the reader of the
stream; when a rank ends, `finish` says whether a row is missing. A fault is returned as a value, and `calls/streams.py`
turns it into a failure of that rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from phalanx.wire.value import as_integer


@dataclass(frozen=True)
class StreamedRow:
    """`result` of the row with this place among the rows that the caller gave."""

    index: int
    result: Any


@dataclass(frozen=True)
class RowFault:
    """The rank broke the rule of `stream(by="rows")`: every row of its piece once."""

    rank: int
    message: str


class StreamedRows:
    """The rows of a streamed call.

    Args:
        rows: of each piece, in order of the pieces.
        ranks: the rank that streams each piece, aligned with `rows`.
        given: rows of each piece with its padding; results of padded rows are dropped. None: no padding.
        order: place of row j of the joined pieces among the caller's rows; None: j.
    """

    def __init__(
        self,
        rows: Sequence[int],
        ranks: Sequence[int],
        given: Sequence[int] | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        self._rows = dict(zip(ranks, rows, strict=True))
        self._given = dict(zip(ranks, given or rows, strict=True))
        self._starts = dict(zip(ranks, accumulate(rows, initial=0), strict=False))
        self._order = order
        self._seen: dict[int, set[int]] = {rank: set() for rank in ranks}

    def receive(self, rank: int, item: Any) -> StreamedRow | RowFault | None:
        """Take an item that a rank yielded. None: a padded row."""
        index = as_integer(item[0]) if isinstance(item, tuple) and len(item) == 2 else None
        if index is None:
            return RowFault(
                rank, f"it yielded {_described(item)}: yield (index of the row in its piece, result)"
            )
        given = self._given[rank]
        if not 0 <= index < given:
            return RowFault(rank, f"it yielded row {index} of a piece of {given} rows: count from 0")
        if index in self._seen[rank]:
            return RowFault(rank, f"it yielded row {index} of its piece twice: yield every row once")
        self._seen[rank].add(index)
        if index >= self._rows[rank]:
            return None
        place = self._starts[rank] + index
        return StreamedRow(place if self._order is None else int(self._order[place]), item[1])

    def finish(self, rank: int) -> RowFault | None:
        """The rank yields no more."""
        missing = sorted(set(range(self._rows[rank])) - self._seen[rank])
        if not missing:
            return None
        shown = ", ".join(str(index) for index in missing[:8]) + (", ..." if len(missing) > 8 else "")
        return RowFault(
            rank,
            f"it ended without {len(missing)} of the {self._rows[rank]} rows of its piece ({shown}): yield every"
            " row once",
        )


def _described(item: Any) -> str:
    if isinstance(item, tuple):
        return f"a tuple of {len(item)} ({', '.join(type(each).__name__ for each in item[:4])})"
    return f"a {type(item).__name__}"
