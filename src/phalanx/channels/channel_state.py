"""State machine of a channel: order, counts, leases and waiting requests. Pure: the clock is passed in.

Puts and takes have a request id, and are answered through ``done``, immediately or later, with an error or a result.
The result of a put is (number, rows), that of a take (ranges, short).

After every call, in items and in rows: submitted = delivered + dropped + lost + waiting + taken. Items of a producer
are delivered in the order of its puts. Takes are served in the order of their arrival.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeVar

from phalanx.channels.staleness_state import (
    NOT_PUT,
    STALE,
    Done,
    Gone,
    Item,
    Outcome,
    RequestId,
    SavedState,
    count_reason,
    display_name,
)
from phalanx.display.text_format import size
from phalanx.errors import ChannelEmpty, ChannelError, ChannelFull, ItemsLost

E = TypeVar("E", bound=ChannelError)
By = Literal["items", "bytes"]
_RATE_S = 10


def units_in(item: Item) -> int:
    """Return the number of units of an item: its rows, or 1."""
    return max(item.rows or 0, 1)


class RowRange(NamedTuple):
    """Rows ``start`` to ``stop`` of an item. An item without rows is a single unit, 0 to 1."""

    number: int
    start: int
    stop: int
    item: Item

    @property
    def nbytes(self) -> int:
        """Share of the bytes. The shares of all ranges of an item sum to its bytes."""
        nbytes, size = self.item.nbytes, units_in(self.item)
        return nbytes * self.stop // size - nbytes * self.start // size

    @property
    def rows(self) -> int:
        """Number of rows. An item without rows is a unit without a row."""
        return self.stop - self.start if self.item.rows else 0

    @property
    def whole(self) -> bool:
        """True if the range is the complete item: its payload is used without slicing."""
        return self.stop - self.start == units_in(self.item)


class Take(NamedTuple):
    """A waiting take of ``most`` items or rows, of which ``at_least`` suffice."""

    done: Done
    most: int
    by_rows: bool
    at_least: int

    @property
    def wanted(self) -> str:
        """Request as text, for errors."""
        return f"{self.most} {'rows' if self.by_rows else 'items'} were asked for"


@dataclass
class Loss:
    """Items, rows and waiting puts that were lost with the process ``holder``."""

    holder: str
    why: str
    items: int = 0
    rows: int = 0
    puts: int = 0


def lost_items(channel: str, losses: Sequence[Loss]) -> ItemsLost:
    """Return the error that names the lost items and the processes that stored them."""
    texts = [f"{_counts_text(loss)} of {display_name(loss.holder)}: {loss.why}" for loss in losses]
    text = (
        f"items were lost with the process that stored their bytes: {'; '.join(texts) or 'part of this batch'}. To "
        "keep items longer than the process that put them, drain the channel before that process is closed, or create "
        "it with handoff=True"
    )
    error = channel_error(ItemsLost, channel, text)
    error.losses = tuple(losses)
    return error


def _counts_text(loss: Loss) -> str:
    counts = ((loss.items, "item"), (loss.rows, "row"), (loss.puts, "waiting put"))
    return ", ".join(f"{count} {noun}{'s' if count > 1 else ''}" for count, noun in counts if count)


def limit_text(maxsize: int | None, by: By) -> str:
    """Return the bound of a channel as text."""
    if maxsize is None:
        return "any number of items"
    return size(maxsize) if by == "bytes" else f"{maxsize} item{'s' if maxsize > 1 else ''}"


def channel_error(kind: type[E], channel: str, text: str) -> E:
    """Return an error of a channel."""
    return kind(f"channel {channel!r}: {text}", channel=channel)


@dataclass(frozen=True)
class ItemCounts:
    """Counts of all items or rows: submitted = delivered + dropped + lost + waiting + taken."""

    submitted: int = 0
    delivered: int = 0
    dropped: int = 0
    lost: int = 0
    waiting: int = 0
    taken: int = 0


@dataclass(frozen=True)
class Depth:
    """Fill level of a channel. The age is in seconds, the rate is over at most the last ten seconds.

    ``waiting`` and ``taken`` count row ranges: an item is a single range, unless a part of its rows was taken or
    requeued.
    """

    waiting: int
    waiting_rows: int
    waiting_bytes: int
    taken: int
    leases: int
    puts: int
    """Producers that wait for capacity."""
    takes: int
    """Consumers that wait for items."""
    oldest_item: float
    delivered_per_second: float


@dataclass(frozen=True)
class ChannelStatus:
    """Depth, counts and consumers of a channel."""

    depth: Depth
    items: ItemCounts
    rows: ItemCounts
    reasons: Mapping[str, int]
    """Dropped row ranges by reason."""
    consumers: Mapping[str, int]
    """Open leases by consumer."""
    leaving: tuple[str, ...]
    """Producers that end and wait until their items are delivered."""


@dataclass(eq=False)
class ChannelState:
    """A channel in which at most ``maxsize`` items or bytes wait; None: no bound. Leased items do not count.

    ``reclaim`` is called with items that have ended or are moved, so that the process that stored them frees them.
    """

    name: str = ""
    maxsize: int | None = None
    by: By = "items"
    reclaim: Callable[[Item], None] = lambda item: None
    clock: Callable[[], float] = lambda: 0.0
    reasons: Counter[str] = field(default_factory=Counter)
    ended: str | None = None
    closed: bool = False
    leases: dict[RequestId, list[RowRange]] = field(default_factory=dict)
    _waiting: deque[RowRange] = field(default_factory=deque)
    _rows: int = 0
    """Rows of the waiting ranges; the next two fields count their bytes, and the ranges without rows."""
    _nbytes: int = 0
    _rowless: int = 0
    _puts: dict[RequestId, tuple[Item, Done]] = field(default_factory=dict)
    _takes: dict[RequestId, Take] = field(default_factory=dict)
    _losses: dict[str, Loss] = field(default_factory=dict)
    _died: dict[str, str] = field(default_factory=dict)
    _left: dict[str, str] = field(default_factory=dict)
    _item_counts: Counter[str] = field(default_factory=Counter)
    _row_counts: Counter[str] = field(default_factory=Counter)
    _delivered: Counter[int] = field(default_factory=Counter)
    """Delivered ranges by second."""

    # Requests

    def put(self, done: Done, item: Item) -> None:
        """Accept an item as soon as the channel has capacity."""
        peer = item.request[0]
        ended = self.ended or self._died.get(peer) or self._left.get(peer)
        if ended is not None:
            refuse(item, done, Gone(f"{ended}; nothing can be put"))
        else:
            self._puts[item.request] = item, done
            self._advance()

    def take(self, request: RequestId, done: Done, most: int, by_rows: bool, at_least: int) -> None:
        """Lease items or rows, under the name ``request``, as soon as there are enough."""
        self._takes[request] = Take(done, most, by_rows, at_least)
        self._advance()

    def cancel(self, request: RequestId, note: str = "") -> None:
        """Answer a request that still waits with an error, which ends with ``note``."""
        if request in self._takes:
            take = self._takes.pop(request)
            reason = (
                f"{take.wanted}, but at the timeout there were {len(self._waiting)} items with {self._rows} "
                f"rows; put more, take fewer or wait longer. Nothing was taken{note}"
            )
            take.done(channel_error(ChannelEmpty, self.name, reason))
        elif request in self._puts:
            reason = (
                f"no room for the item in time: at most {limit_text(self.maxsize, self.by)} may wait; take faster, "
                f"pass put() a longer timeout=, or create the channel with a larger maxsize{note}"
            )
            refuse(*self._puts.pop(request), channel_error(ChannelFull, self.name, reason))
        self._advance()

    def withdraw(self, request: RequestId) -> None:
        """Cancel a request. If it was served before, requeue the ranges that it took, or drop the item that it put."""
        self.cancel(request)
        self.requeue(request)
        self._drop(self._withdraw(lambda item: item.request == request), "its put was withdrawn")
        self._advance()

    def ack(self, lease: RequestId) -> None:
        """Count the ranges of a lease as delivered."""
        if lease in self.leases:
            ranges = self.leases.pop(lease)
            self._delivered[int(self.clock())] += len(ranges)
            self._settle(ranges, "delivered")
            self._advance()

    def requeue(self, lease: RequestId, unreadable: Collection[int] = ()) -> list[Loss]:
        """Put the ranges of a lease back in their places. Return the losses of unreadable items."""
        losses: dict[str, Loss] = {}
        if lease in self.leases:
            ranges = self.leases.pop(lease) + self._withdraw(lambda item: item.number in unreadable)
            self._lose([units for units in ranges if units.number in unreadable], losses)
            self._restore([units for units in ranges if units.number not in unreadable])
            self._advance()
        return list(losses.values())

    def drop(self, reason: str, numbers: Collection[int] | None = None) -> int:
        """Drop waiting items, all or the given ones, and return the number of dropped ranges."""
        ranges = self._withdraw(lambda item: numbers is None or item.number in numbers)
        self._drop(ranges, reason)
        self._advance()
        return len(ranges)

    def expire(self) -> None:
        """Drop waiting rows that became too old."""
        self._set_waiting(self._without_stale(self._waiting))
        self._advance()

    def leave(self, peer: str) -> list[tuple[int, Any]]:
        """Reject further puts of a process.

        Return the numbers of its items that are needed, with the payloads that can be moved, and (-1, None) for each
        put that waits.
        """
        self._left[peer] = "this process has left the channel"
        taken = {units.number for units in self._taken}
        stored = {units.number: units.item for units in self._open if units.item.holder == peer}
        needed = [(number, None if number in taken else item.payload) for number, item in stored.items()]
        return needed + [(-1, None) for request in self._puts if request[0] == peer]

    def move(self, number: int, payload: bytes) -> None:
        """Replace the payload of an item by its bytes, unless a consumer has taken the item and may read it."""
        taken = {units.number for units in self._taken}
        for item in (units.item for units in self._waiting if units.number == number not in taken):
            self.reclaim(item)
            item.payload = payload

    def peer_died(self, peer: str, why: str) -> None:
        """Requeue the leases of a dead process, and count the items whose bytes it stored as lost."""
        self._died.setdefault(peer, why)
        puts = self._end_requests(why, peer)
        if puts:
            self._losses.setdefault(peer, Loss(peer, why)).puts += puts
        leases = [lease for lease in self.leases if lease[0] == peer]
        self._restore([units for lease in leases for units in self.leases.pop(lease)])
        self._advance()

    def finish(self) -> None:
        """Reject further puts. Waiting items can still be taken."""
        self.ended = self.ended or "it was finished: nothing more is put"
        self._advance()

    def close(self, reason: str) -> list[Loss]:
        """Drop waiting items, and answer every waiting request. Return the losses that no take has reported."""
        self.closed, self.ended = True, reason
        self._end_requests(reason)
        self.drop(reason)
        return self.losses

    def _end_requests(self, reason: str, peer: str | None = None) -> int:
        """Answer the waiting requests, all or those of a process. Return the number of puts."""
        puts = [self._puts.pop(request) for request in [*self._puts] if peer in (None, request[0])]
        takes = [self._takes.pop(request) for request in [*self._takes] if peer in (None, request[0])]
        for item, done in puts:
            refuse(item, done, Gone(reason))
        for take in takes:
            take.done(Gone(reason))
        return len(puts)

    # Reports

    @property
    def losses(self) -> list[Loss]:
        """Losses that no take has reported."""
        return list(self._losses.values())

    @property
    def items(self) -> ItemCounts:
        """Counts of items. An item that is partly taken and partly waiting counts as waiting."""
        waiting = {units.number for units in self._waiting}
        taken = {units.number for units in self._taken} - waiting
        return ItemCounts(**self._item_counts, waiting=len(waiting), taken=len(taken))

    @property
    def rows(self) -> ItemCounts:
        """Counts of rows."""
        taken = sum(units.rows for units in self._taken)
        return ItemCounts(**self._row_counts, waiting=self._rows, taken=taken)

    def level(self) -> tuple[int, float]:
        """Return the number of waiting ranges, and the age of the oldest item in seconds."""
        return len(self._waiting), self.clock() - self._waiting[0].item.at if self._waiting else 0.0

    @property
    def _taken(self) -> list[RowRange]:
        return [units for ranges in self.leases.values() for units in ranges]

    @property
    def _open(self) -> list[RowRange]:
        """All ranges that wait or are taken, in order."""
        return sorted([*self._taken, *self._waiting])

    def status(self) -> ChannelStatus:
        """Return counts, depth and consumers."""
        now = self.clock()
        for second in [second for second in self._delivered if second <= now - _RATE_S]:
            del self._delivered[second]
        depth = Depth(
            waiting=len(self._waiting),
            waiting_rows=self._rows,
            waiting_bytes=self._nbytes,
            taken=len(self._taken),
            leases=len(self.leases),
            puts=len(self._puts),
            takes=len(self._takes),
            oldest_item=self.level()[1],
            delivered_per_second=self._delivered.total() / max(now - min(self._delivered, default=now), 1.0),
        )
        consumers = Counter(lease[0] for lease in self.leases)
        leaving = {units.item.holder for units in self._open if units.item.holder in self._left}
        return ChannelStatus(depth, self.items, self.rows, dict(self.reasons), consumers, tuple(leaving))

    def state(self) -> SavedState:
        """Return the state to save, in which taken items wait again."""
        return {
            "ranges": _copy(self._open),
            "item_counts": Counter(self._item_counts),
            "row_counts": Counter(self._row_counts),
            "reasons": Counter(self.reasons),
            "losses": {holder: replace(loss) for holder, loss in self._losses.items()},
            "ended": None if self.closed else self.ended,
        }

    def restore(self, state: SavedState) -> None:
        """Continue from ``state``."""
        self._losses, self.reasons, self.ended = state["losses"], state["reasons"], state["ended"]
        self._item_counts, self._row_counts = state["item_counts"], state["row_counts"]
        for item in (units.item for units in state["ranges"]):
            item.at = self.clock()  # the saved time is of another process's clock
        self._set_waiting(state["ranges"])
        self.expire()

    # Transitions

    def _advance(self) -> None:
        """Accept puts and serve takes until neither is possible."""
        while self._accept() or self._serve():
            pass

    def _accept(self) -> bool:
        if not self._puts:
            return False
        item, done = next(iter(self._puts.values()))
        if not self._has_capacity(item) and not self._is_short():
            return False
        del self._puts[item.request]
        item.number, item.open_units, item.at = self._item_counts["submitted"], units_in(item), self.clock()
        self._item_counts["submitted"] += 1
        self._row_counts["submitted"] += item.rows or 0
        if item.bounded is not None:
            item.bounded.enter(item)
        fresh = self._without_stale([RowRange(item.number, 0, units_in(item), item)])
        for units in fresh:
            self._waiting.append(units)
            self._count(units, 1)
        done((item.number, sum(units.rows for units in fresh)))
        return True

    def _has_capacity(self, item: Item) -> bool:
        if self.maxsize is None or not self._waiting:
            return True
        if self.by == "bytes":
            return self._nbytes + item.nbytes <= self.maxsize
        return len(self._waiting) < self.maxsize

    def _is_short(self) -> bool:
        """Return whether the first take needs more than the waiting ranges. Puts may then exceed ``maxsize``."""
        return any(not self._is_enough(take) for take in [*self._takes.values()][:1])

    def _is_enough(self, take: Take) -> bool:
        return (self._rows if take.by_rows else len(self._waiting)) >= take.at_least

    def _serve(self) -> bool:
        """Answer the first take, unless it has to wait."""
        if not self._takes:
            return False
        request, take = next(iter(self._takes.items()))
        answer = self._answer(request, take)
        if answer is not None:
            del self._takes[request]
            take.done(answer)
        return answer is not None

    def _answer(self, request: RequestId, take: Take) -> tuple[list[RowRange], bool] | Exception | None:
        if self._losses:
            losses, self._losses = self.losses, {}
            return lost_items(self.name, losses)
        unfit = self._first_without_rows(take.most) if take.by_rows and self._rowless else None
        if unfit is not None:
            text = (
                f"{take.wanted}, but item {unfit.number}, put by {display_name(unfit.request[0])}, is not made of "
                "rows; take items by take(n) or get(), or put tensors, arrays, lists, or structures of these with "
                "equal numbers of rows"
            )
            return channel_error(ChannelError, self.name, text)
        short = not self._is_enough(take)
        if short and (self.ended is None or self._puts):
            return None
        if self._waiting:
            return self._lease(request, take), short
        return None if self._may_be_requeued() else Gone(f"{self.ended}; nothing can be taken")

    def _first_without_rows(self, count: int) -> Item | None:
        """Return the first item that is not made of rows, among the first ``count`` rows."""
        for units in self._waiting:
            if units.item.rows is None:
                return units.item
            count -= units.rows
            if count <= 0:
                return None
        return None

    def _may_be_requeued(self) -> bool:
        """Return whether a consumer that has no waiting take has items, which it may requeue."""
        waiting = {request[0] for request in self._takes}
        return not self.closed and any(lease[0] not in waiting for lease in self.leases)

    def _lease(self, request: RequestId, take: Take) -> list[RowRange]:
        ranges: list[RowRange] = []
        left = take.most
        while left > 0 and self._waiting:
            units = self._waiting.popleft()
            rows = units.rows if take.by_rows else 1
            if rows > left:
                middle = units.start + left
                self._waiting.appendleft(units._replace(start=middle))
                units = units._replace(stop=middle)
            self._count(units, -1)
            ranges.append(units)
            left -= rows
            _move_bounded(units, taken=True)
        self.leases[request] = ranges
        return _copy(ranges) if any(units.item.bounded for units in ranges) else ranges

    def _restore(self, ranges: Sequence[RowRange]) -> None:
        """Put taken ranges back in their places. Stale rows are dropped, rows of dead processes are lost."""
        for units in reversed(ranges):
            _move_bounded(units, taken=False)
        self._set_waiting([*self._waiting, *self._without_stale(ranges)])
        if self.closed:
            self.drop(self.ended or "")
        self._lose(self._withdraw(lambda item: item.holder in self._died), self._losses)

    def _set_waiting(self, ranges: Iterable[RowRange]) -> None:
        """Set the waiting ranges, in order. Adjacent ranges of an item are joined."""
        ordered, self._waiting = sorted(ranges), deque()
        self._rows = self._nbytes = self._rowless = 0
        for units in ordered:
            if self._waiting and (self._waiting[-1].number, self._waiting[-1].stop) == units[:2]:
                self._waiting[-1] = self._waiting[-1]._replace(stop=units.stop)
            else:
                self._waiting.append(units)
            self._count(units, 1)

    def _withdraw(self, matches: Callable[[Item], bool]) -> list[RowRange]:
        """Remove and return the waiting ranges of matching items."""
        matching = [units for units in self._waiting if matches(units.item)]
        if matching:
            self._set_waiting([units for units in self._waiting if not matches(units.item)])
        return matching

    def _without_stale(self, ranges: Iterable[RowRange]) -> list[RowRange]:
        """Drop the rows that are too old, and return the ranges of the others."""
        parts: dict[bool, list[RowRange]] = {False: [], True: []}
        for units in ranges:
            if units.item.bounded is None:
                parts[False].append(units)
                continue
            for is_stale, run in groupby(range(units.start, units.stop), units.item.is_stale):
                rows = [*run]
                parts[is_stale].append(units._replace(start=rows[0], stop=rows[-1] + 1))
        self._drop(parts[True], STALE)
        return parts[False]

    def _drop(self, ranges: Sequence[RowRange], reason: str) -> None:
        if ranges:
            count_reason(self.reasons, reason, len(ranges))
        self._settle(ranges, "dropped")

    def _lose(self, ranges: Sequence[RowRange], losses: dict[str, Loss]) -> None:
        numbers: set[int] = set()
        for units in ranges:
            holder = units.item.request[0]
            loss = losses.setdefault(
                holder, Loss(holder, self._died.get(holder, "its bytes could not be read"))
            )
            loss.items += units.number not in numbers
            loss.rows += units.rows
            numbers.add(units.number)
        self._settle(ranges, "lost")

    def _settle(self, ranges: Iterable[RowRange], outcome: Outcome) -> None:
        """Count ranges that are neither waiting nor taken any more. An item without open units has ended."""
        for units in ranges:
            item = units.item
            if item.bounded is not None and outcome != "delivered":
                reason = f"{outcome} in the channel"
                item.bounded.remove(item, units.start, units.stop, reason)
            item.open_units -= units.stop - units.start
            item.outcome = max(item.outcome, outcome)  # alphabetical: delivered, dropped, lost
            self._row_counts[outcome] += units.rows
            if item.open_units == 0:
                self._item_counts[item.outcome] += 1
                self.reclaim(item)
                if item.bounded is not None:
                    item.payload = b""  # the staleness has the rows until they are trained on

    def _count(self, units: RowRange, sign: int) -> None:
        """Add a range to the totals of the waiting ranges, or subtract it."""
        self._rows += sign * units.rows
        self._nbytes += sign * units.nbytes
        self._rowless += sign * (units.item.rows is None)


def refuse(item: Item, done: Done, error: Exception) -> None:
    """Answer a put that is not accepted. Leased rows are dropped, which frees their quota."""
    if item.bounded is not None:
        item.bounded.end(item.request, NOT_PUT)
    done(error)


def _copy(ranges: Sequence[RowRange]) -> list[RowRange]:
    """Return ranges of copies of their items, for other processes."""
    items = {units.number: replace(units.item, bounded=None) for units in ranges}
    return [units._replace(item=items[units.number]) for units in ranges]


def _move_bounded(units: RowRange, *, taken: bool) -> None:
    if units.item.bounded is not None:
        units.item.bounded.move(units.item, units.start, units.stop, taken=taken)
