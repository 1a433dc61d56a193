"""Values that other processes stored in parts: arguments of a call by reference, without fetching them here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from phalanx.backends.backend_types import Ref
from phalanx.dispatch.split import piece_bounds
from phalanx.errors import DispatchError
from phalanx.wire.value import Value


class StoredPart(NamedTuple):
    """Rows ``start`` to ``stop`` of a stored value, or of a value that is here as bytes; all rows if ``whole``."""

    source: Ref | bytes
    start: int
    stop: int
    whole: bool = True


class StoredParts(ABC):
    """A value in parts; planned like a future. If ``joined``, it has the rows of the parts, else the parts as items."""

    __phalanx_future__: ClassVar[bool] = True
    kinds: ClassVar[set[type]] = set()
    joined: bool

    def __init_subclass__(cls) -> None:
        StoredParts.kinds.add(cls)

    @property
    @abstractmethod
    def parts(self) -> Sequence[StoredPart]:
        """The stored parts, in order."""

    @property
    @abstractmethod
    def backend(self) -> str:
        """Name of the backend that stores them."""

    @abstractmethod
    def result(self) -> Value:
        """The value, here."""


def rows_between(parts: Sequence[StoredPart], start: int, stop: int) -> list[StoredPart]:
    """The parts with rows ``start`` to ``stop`` of all; of no rows, no row of the first, for its dtype and shape."""
    found: list[StoredPart] = []
    begin = 0
    for part in parts:
        rows = part.stop - part.start
        first, last = max(start - begin, 0), min(stop - begin, rows)
        if first < last:
            whole = part.whole and last - first == rows
            found.append(StoredPart(part.source, part.start + first, part.start + last, whole))
        begin += rows
    return found or [StoredPart(part.source, part.start, part.start, False) for part in parts[:1]]


def piece_between(value: StoredParts, index: int, count: int, expected_rows: int | None) -> list[StoredPart]:
    """Return the parts of shard ``index`` of ``count`` even shards.

    Raises:
        DispatchError: its number of rows differs from that of the other arguments.
    """
    if not value.joined:
        total = len(value.parts)
        _check(total, expected_rows)
        start, stop = piece_bounds(total, count, index)
        return list(value.parts[start:stop])
    total = sum(part.stop - part.start for part in value.parts)
    _check(total, expected_rows)
    return rows_between(value.parts, *piece_bounds(total, count, index))


def _check(rows: int, expected: int | None) -> None:
    if expected not in (None, rows):
        raise DispatchError(
            f"the arguments of one call disagree in rows: a batch of a channel has {rows} rows, the other arguments "
            f"have {expected}; pass the same number of rows in each, or px.replicate(x)"
        )
