"""Items of a channel, and the ranges of their rows that wait, in order. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from phalanx.channels.staleness_state import StalenessState

Outcome = Literal["delivered", "dropped", "lost"]


class RowRange(NamedTuple):
    """Rows ``start`` to ``stop`` of an item. An item without rows is a single unit, 0 to 1."""

    number: int
    start: int
    stop: int


class ItemSlice(NamedTuple):
    """Part of an item, as a consumer gets it. ``whole``: the payload is used without slicing."""

    number: int
    payload: Any
    nbytes: int
    start: int
    stop: int
    rows: int
    whole: bool
    lengths: tuple[float, ...]


@dataclass(slots=True)
class Item:
    """Value of a put. ``holder`` is the process that stores the bytes, None if the payload contains them."""

    producer: str
    payload: Any
    nbytes: int
    rows: int | None
    holder: str | None = None
    lengths: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    bound: StalenessState | None = None
    token: tuple[str, int] = ("", -1)
    """Key of the channel, and the position in the order of all items."""
    open_units: int = 0
    outcome: Outcome = "delivered"
    at: float = 0.0

    @property
    def size(self) -> int:
        """Number of units: rows, or 1."""
        return max(self.rows or 0, 1)

    def bytes_in(self, units: RowRange) -> int:
        """Return the share of the bytes. The shares of all ranges sum to ``nbytes``."""
        return self.nbytes * units.stop // self.size - self.nbytes * units.start // self.size

    def rows_in(self, units: RowRange) -> int:
        """Return the number of rows. An item without rows is a unit without a row."""
        return units.stop - units.start if self.rows else 0

    def slice(self, units: RowRange) -> ItemSlice:
        """Return a range as a consumer gets it."""
        number, start, stop = units
        whole, lengths = stop - start == self.size, self.lengths[start:stop]
        nbytes, rows = self.bytes_in(units), self.rows_in(units)
        return ItemSlice(number, self.payload, nbytes, start, stop, rows, whole, lengths)

    def is_stale(self, row: int) -> bool:
        """Return whether a row is older than its bound permits."""
        return self.bound is not None and self.versions[row] < self.bound.oldest

    def split(
        self, units: RowRange, is_stale: Callable[[int], bool]
    ) -> tuple[list[RowRange], list[RowRange]]:
        """Return the fresh and the stale ranges of ``units``. Only rows with a bound can be stale."""
        if self.bound is None:
            return [units], []
        parts: tuple[list[RowRange], list[RowRange]] = [], []
        for row in range(units.start, units.stop):
            part = parts[is_stale(row)]
            if part and part[-1].stop == row:
                part[-1] = part[-1]._replace(stop=row + 1)
            else:
                part.append(RowRange(units.number, row, row + 1))
        return parts


class WaitingRows:
    """Ranges of ``items`` that wait, with their total numbers of rows and bytes."""

    def __init__(self, items: Mapping[int, Item]) -> None:
        self.rows = self.nbytes = self._rowless = 0
        self._items = items
        self._ranges: deque[RowRange] = deque()

    def __len__(self) -> int:
        return len(self._ranges)

    def __iter__(self) -> Iterator[RowRange]:
        return iter(self._ranges)

    @property
    def first(self) -> Item | None:
        """Item of the first range."""
        return self._items[self._ranges[0].number] if self._ranges else None

    def append(self, units: RowRange) -> None:
        """Add a range at the end."""
        self._ranges.append(units)
        self._count(units, 1)

    def insert(self, ranges: Sequence[RowRange]) -> None:
        """Add ranges at their places. Adjacent ranges of an item are joined."""
        for units in ranges:
            self._count(units, 1)
        joined: deque[RowRange] = deque()
        for units in sorted([*ranges, *self._ranges]):
            if joined and joined[-1].number == units.number and joined[-1].stop == units.start:
                joined[-1] = joined[-1]._replace(stop=units.stop)
            else:
                joined.append(units)
        self._ranges = joined

    def take_items(self, count: int) -> list[RowRange]:
        """Remove and return the first ranges."""
        return [self._pop() for _ in range(min(count, len(self._ranges)))]

    def take_rows(self, count: int) -> list[RowRange]:
        """Remove and return the ranges of the first rows. The last range is split if it has more rows."""
        taken: list[RowRange] = []
        while count > 0 and self._ranges:
            units = self._pop()
            if (rows := self._items[units.number].rows_in(units)) > count:
                middle = units.start + count
                self._ranges.appendleft(units._replace(start=middle))
                self._count(units._replace(start=middle), 1)
                units, rows = units._replace(stop=middle), count
            taken.append(units)
            count -= rows
        return taken

    def first_without_rows(self, count: int) -> Item | None:
        """Return the first item among ``count`` rows that is not made of rows."""
        for units in self._ranges if self._rowless else ():
            item = self._items[units.number]
            if item.rows is None:
                return item
            count -= item.rows_in(units)
            if count <= 0:
                return None
        return None

    def withdraw(self, matches: Callable[[Item], bool]) -> list[RowRange]:
        """Remove and return the ranges of matching items."""
        leaving = [units for units in self._ranges if matches(self._items[units.number])]
        if leaving:
            self._ranges = deque(units for units in self._ranges if not matches(self._items[units.number]))
        for units in leaving:
            self._count(units, -1)
        return leaving

    def withdraw_stale(self, is_stale: Callable[[Item, int], bool]) -> list[RowRange]:
        """Remove and return the ranges of stale rows, which have a bound."""
        if not any(item.bound is not None for item in self._items.values()):
            return []
        waiting, self._ranges = self._ranges, deque()
        stale: list[RowRange] = []
        for units in waiting:
            item = self._items[units.number]
            self._count(units, -1)
            fresh, old = item.split(units, partial(is_stale, item))
            for part in fresh:
                self.append(part)
            stale += old
        return stale

    def _pop(self) -> RowRange:
        units = self._ranges.popleft()
        self._count(units, -1)
        return units

    def _count(self, units: RowRange, sign: int) -> None:
        item = self._items[units.number]
        self.rows += sign * item.rows_in(units)
        self.nbytes += sign * item.bytes_in(units)
        self._rowless += sign * (item.rows is None)
