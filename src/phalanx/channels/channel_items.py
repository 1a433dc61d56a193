"""An item of a channel, and the cuts into which takes of rows divide it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Cut(NamedTuple):
    """Rows `start` to `stop` of item `number`; tuples of these sort in the order of the channel.

    An item without rows (`rows` None or 0) is one unit that cannot be divided: 0 to 1.
    """

    number: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Units: rows, or 1."""
        return self.stop - self.start


@dataclass(frozen=True)
class Item:
    """What was put once: where its bytes are and how much it is, never the bytes themselves."""

    number: int
    """Place in the order of acceptance, from 0; items of one producer ascend in the order in which it put them."""
    producer: str
    holder: str
    """The process that has the bytes."""
    payload: Any = field(repr=False, compare=False)
    """Opaque: what the link needs to fetch the bytes."""
    nbytes: int
    rows: int | None
    """None: an item that is not made of rows, and that a take of rows does not accept."""
    at: float
    """When it was accepted, in seconds of the caller's clock."""

    @property
    def size(self) -> int:
        """Units: rows, or 1 for an item without rows."""
        return max(self.rows or 0, 1)

    @property
    def whole(self) -> Cut:
        return Cut(self.number, 0, self.size)

    def rows_in(self, cut: Cut) -> int:
        """Rows of the cut; 0 for an item without rows."""
        return cut.size if self.rows else 0

    def bytes_in(self, cut: Cut) -> int:
        """Its share of the bytes; the shares of cuts that make up the item sum to its bytes."""
        return self.nbytes * cut.stop // self.size - self.nbytes * cut.start // self.size


@dataclass(frozen=True)
class Part:
    """What a taker is given of one item: all of it, or the rows of `cut`."""

    item: Item
    cut: Cut

    @property
    def rows(self) -> int:
        return self.item.rows_in(self.cut)

    @property
    def nbytes(self) -> int:
        return self.item.bytes_in(self.cut)

    @property
    def is_whole(self) -> bool:
        """Whether the payload can be used as it is, without slicing rows out of it."""
        return self.cut == self.item.whole
