"""Where everything that a channel accepted is: waiting, taken, or at its end. Pure; used by `ChannelHome`.

Each unit (row, or item without rows) of each accepted item is in exactly one place: a cut that waits, a cut that
somebody took, or one of the three ends. The ledger moves units between these places and counts; who waits for
what is the home's affair.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from phalanx.channels.channel_items import Cut, Item, Part
from phalanx.errors import InternalError

End = Literal["delivered", "dropped", "lost"]
"""How units leave a channel: acknowledged by a consumer; let go by request; gone with a process."""

_WORST: tuple[End, ...] = ("delivered", "dropped", "lost")


@dataclass(frozen=True)
class Tally:
    """How many items, or rows, are where. `submitted` is the sum of all the others."""

    submitted: int = 0
    delivered: int = 0
    dropped: int = 0
    lost: int = 0
    waiting: int = 0
    taken: int = 0

    @property
    def is_balanced(self) -> bool:
        """Whether nothing has vanished, and nothing counts twice."""
        return self.submitted == self.delivered + self.dropped + self.lost + self.waiting + self.taken


@dataclass
class Entry:
    """An item some units of which are still under way. The item's own end is the worst of its units'."""

    item: Item
    left: int
    waiting: int
    end: End = "delivered"


@dataclass(frozen=True)
class LedgerState:
    """What a ledger needs to go on elsewhere: entries by value, the cuts that wait, and the totals."""

    entries: tuple[Entry, ...]
    waiting: tuple[Cut, ...]
    items: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    next_number: int = 0


class Ledger:
    """All items of one channel, in order."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._waiting: deque[Cut] = deque()
        self._items: dict[str, int] = {}
        self._rows: dict[str, int] = {}
        self._next = 0
        self.waiting_rows = 0
        self.waiting_bytes = 0
        self.without_rows = 0
        """Cuts that wait and belong to items that are not made of rows."""

    def __len__(self) -> int:
        """Cuts that wait: items, and what is left of those from which rows were taken."""
        return len(self._waiting)

    @property
    def live(self) -> Iterable[Item]:
        """The items some units of which wait or are taken."""
        return [entry.item for entry in self._entries.values()]

    @property
    def oldest(self) -> Item | None:
        return self._entries[self._waiting[0].number].item if self._waiting else None

    def accept(
        self, producer: str, holder: str, payload: Any, nbytes: int, rows: int | None, at: float
    ) -> Item:
        """A new item at the end of the order."""
        item = Item(self._next, producer, holder, payload, nbytes, rows, at)
        self._next += 1
        self._entries[item.number] = Entry(item, left=item.size, waiting=0)
        self._bump(self._items, "submitted", 1)
        self._bump(self._rows, "submitted", rows or 0)
        self._arrive(item.whole)
        self._waiting.append(item.whole)
        return item

    def item(self, number: int) -> Item:
        """An item that is under way, as it is now."""
        return self._entries[number].item

    def part(self, cut: Cut) -> Part:
        return Part(self._entries[cut.number].item, cut)

    def take_items(self, count: int) -> list[Cut]:
        """The first `count` cuts that wait, or all."""
        return [self._leave(self._waiting.popleft()) for _ in range(min(count, len(self._waiting)))]

    def take_rows(self, count: int) -> list[Cut]:
        """Cuts from the front with `count` rows in all, or all there are; the rest of a cut item stays in front."""
        taken: list[Cut] = []
        while count > 0 and self._waiting:
            cut = self._waiting.popleft()
            rows = self._entries[cut.number].item.rows_in(cut)
            if rows > count:
                self._waiting.appendleft(Cut(cut.number, cut.start + count, cut.stop))
                cut, rows = Cut(cut.number, cut.start, cut.start + count), count
            taken.append(self._leave(cut))
            count -= rows
        return taken

    def first_without_rows(self, count: int) -> Item | None:
        """The item, not made of rows, that a take of `count` rows would meet."""
        if not self.without_rows:
            return None
        for cut in self._waiting:
            item = self._entries[cut.number].item
            if item.rows is None:
                return item
            count -= item.rows_in(cut)
            if count <= 0:
                return None
        return None

    def restore(self, cuts: Collection[Cut]) -> None:
        """Taken cuts wait again, at their places in the order; neighbours of one item become one cut."""
        if not cuts:
            return
        for cut in cuts:
            self._arrive(cut)
        joined: deque[Cut] = deque()
        for cut in sorted([*cuts, *self._waiting]):
            last = joined[-1] if joined else None
            if last is not None and last.number == cut.number and last.stop == cut.start:
                joined[-1] = Cut(cut.number, last.start, cut.stop)
            else:
                joined.append(cut)
        self._waiting = joined

    def withdraw(self, matches: Callable[[Item], bool]) -> list[Cut]:
        """The waiting cuts of items that match: they are taken now, by nobody."""
        leaving = [cut for cut in self._waiting if matches(self._entries[cut.number].item)]
        gone = set(leaving)
        self._waiting = deque(cut for cut in self._waiting if cut not in gone)
        return [self._leave(cut) for cut in leaving]

    def settle(self, cuts: Collection[Cut], end: End) -> list[Item]:
        """Taken cuts come to their end; the items of which nothing is under way any more."""
        over: list[Item] = []
        for cut in cuts:
            entry = self._entries.get(cut.number)
            if entry is None or cut.size > entry.left - entry.waiting:
                raise InternalError(f"rows {cut.start} to {cut.stop} of item {cut.number} are not taken")
            entry.left -= cut.size
            entry.end = end if _WORST.index(end) > _WORST.index(entry.end) else entry.end
            self._bump(self._rows, end, entry.item.rows_in(cut))
            if entry.left == 0:
                del self._entries[cut.number]
                self._bump(self._items, entry.end, 1)
                over.append(entry.item)
        return over

    def move(self, number: int, holder: str, payload: Any) -> bool:
        """Another process has the bytes now; False if the item is not under way any more."""
        entry = self._entries.get(number)
        if entry is not None:
            entry.item = replace(entry.item, holder=holder, payload=payload)
        return entry is not None

    def items(self) -> Tally:
        """Counts of items. One that is partly taken and partly waits counts as waiting."""
        waiting = sum(1 for entry in self._entries.values() if entry.waiting)
        return Tally(**self._items, waiting=waiting, taken=len(self._entries) - waiting)

    def rows(self, taken: Iterable[Cut]) -> Tally:
        """Counts of rows, where `taken` are the cuts that consumers have."""
        return Tally(
            **self._rows,
            waiting=self.waiting_rows,
            taken=sum(self.part(cut).rows for cut in taken),
        )

    def state(self, taken: Sequence[Cut]) -> LedgerState:
        """A copy in which what is taken waits again."""
        waiting = [*taken, *self._waiting]
        sizes: dict[int, int] = {}
        for cut in waiting:
            sizes[cut.number] = sizes.get(cut.number, 0) + cut.size
        entries = tuple(replace(entry, waiting=sizes[number]) for number, entry in self._entries.items())
        return LedgerState(entries, tuple(sorted(waiting)), dict(self._items), dict(self._rows), self._next)

    @classmethod
    def load(cls, state: LedgerState, holder: str) -> Ledger:
        """A ledger that goes on from `state`, all whose bytes the process `holder` has."""
        ledger = cls()
        for entry in state.entries:
            item = replace(entry.item, holder=holder)
            ledger._entries[item.number] = replace(entry, item=item, waiting=0)
        ledger._items, ledger._rows = dict(state.items), dict(state.rows)
        ledger._next = state.next_number
        ledger.restore(state.waiting)
        return ledger

    def _arrive(self, cut: Cut) -> None:
        self._shift(cut, 1)

    def _leave(self, cut: Cut) -> Cut:
        self._shift(cut, -1)
        return cut

    def _shift(self, cut: Cut, sign: int) -> None:
        entry = self._entries[cut.number]
        entry.waiting += sign * cut.size
        self.waiting_rows += sign * entry.item.rows_in(cut)
        self.waiting_bytes += sign * entry.item.bytes_in(cut)
        self.without_rows += sign * (entry.item.rows is None)

    @staticmethod
    def _bump(counts: dict[str, int], name: str, by: int) -> None:
        counts[name] = counts.get(name, 0) + by
