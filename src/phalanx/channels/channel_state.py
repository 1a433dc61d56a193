"""State machine of a channel: order, counts, leases and waiting requests. Pure: the clock is passed in.

Puts and takes have a request id, and are answered through ``done``, immediately or later, with a tuple whose first
word is the kind. Puts: ("accepted", number, rows), ("full",), ("ended", why). Takes: ("taken", slices, short),
("lost", losses), ("unfit", number, producer), ("empty", items, rows), ("ended", why).

After every call, in items and in rows: submitted = delivered + dropped + lost + waiting + taken. Items of a producer
are delivered in the order of its puts. Takes are served in the order of their arrival.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from phalanx.channels.staleness_state import STALE, Done, RequestId, StalenessState

By = Literal["items", "bytes"]
Outcome = Literal["delivered", "dropped", "lost"]
_SEVERITY: dict[Outcome, int] = {"delivered": 0, "dropped": 1, "lost": 2}
_FINISHED = "it was finished: nothing more is put"
_LEFT = "this process has left it and puts no more"
_RATE_S = 10


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
    lengths: tuple[float, ...] = ()
    holder: str | None = None
    versions: tuple[int, ...] = ()
    bound: StalenessState | None = None
    number: int = -1
    """Position in the order of all items."""
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

    def versions_in(self, units: RowRange) -> tuple[int, ...]:
        """Return the versions of the rows."""
        return self.versions[units.start : units.stop]

    def slice(self, units: RowRange) -> ItemSlice:
        """Return a range as a consumer gets it."""
        number, start, stop = units
        whole, lengths = stop - start == self.size, self.lengths[start:stop]
        nbytes, rows = self.bytes_in(units), self.rows_in(units)
        return ItemSlice(number, self.payload, nbytes, start, stop, rows, whole, lengths)


class Take(NamedTuple):
    """A take that waits for ``most`` items or rows, at least ``at_least``."""

    done: Done
    at: float
    most: int
    by_rows: bool
    at_least: int


class Lease(NamedTuple):
    """Ranges that a consumer took."""

    ranges: list[RowRange]
    at: float


@dataclass
class Loss:
    """Items, rows and waiting puts that were lost with the process ``holder``."""

    holder: str
    why: str
    items: int = 0
    rows: int = 0
    puts: int = 0


@dataclass(frozen=True)
class ItemCounts:
    """Counts of all items or rows: submitted = delivered + dropped + lost + waiting + taken."""

    submitted: int = 0
    delivered: int = 0
    dropped: int = 0
    lost: int = 0
    waiting: int = 0
    taken: int = 0

    @property
    def is_balanced(self) -> bool:
        """True if the count equation is satisfied."""
        return self.submitted == self.delivered + self.dropped + self.lost + self.waiting + self.taken


@dataclass(frozen=True)
class Depth:
    """Fill level of a channel. Ages are in seconds, rates per second over the last ten seconds.

    ``waiting`` and ``taken`` count row ranges: an item is one, unless a part of its rows was taken or requeued.
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
    oldest_put: float
    oldest_take: float
    oldest_lease: float
    accepted_per_second: float
    delivered_per_second: float
    delivered_bytes_per_second: float


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


class ChannelState:
    """A channel in which at most ``maxsize`` items or bytes wait; None: no bound. Leases do not count.

    ``reclaim`` is called with items that have ended, so that their bytes can be freed.
    """

    def __init__(
        self,
        name: str = "",
        maxsize: int | None = None,
        by: By = "items",
        *,
        reclaim: Callable[[Item], None] = lambda item: None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.name, self.maxsize, self.by = name, maxsize, by
        self.reasons: Counter[str] = Counter()
        self.ended: str | None = None
        self.closed = False
        self.leases: dict[RequestId, Lease] = {}
        self._reclaim, self._clock = reclaim, clock
        self._items: dict[int, Item] = {}
        self._waiting: deque[RowRange] = deque()
        self._rows = self._nbytes = self._rowless = 0
        self._puts: dict[RequestId, tuple[Item, Done]] = {}
        self._takes: dict[RequestId, Take] = {}
        self._losses: dict[str, Loss] = {}
        self._died: dict[str, str] = {}
        self._left: set[str] = set()
        self._item_counts: Counter[str] = Counter()
        self._row_counts: Counter[str] = Counter()
        self._began = clock()
        self._rates: tuple[Counter[int], Counter[int], Counter[int]] = (Counter(), Counter(), Counter())
        """Accepted items, delivered ranges and delivered bytes, by second."""

    # Requests

    def put(self, request: RequestId, done: Done, item: Item) -> None:
        """Accept an item as soon as the channel has capacity."""
        peer = request[0]
        ended = self.ended or self._died.get(peer) or (_LEFT if peer in self._left else None)
        if ended is not None:
            _refuse(item, done, ("ended", ended))
        else:
            item.at = self._clock()
            self._puts[request] = item, done
            self._advance()

    def take(self, request: RequestId, done: Done, most: int, by_rows: bool, at_least: int) -> None:
        """Lease items or rows, under the name ``request``, as soon as there are enough."""
        self._takes[request] = Take(done, self._clock(), most, by_rows, at_least)
        self._advance()

    def cancel(self, request: RequestId) -> None:
        """Answer a request that still waits with ("full",) or ("empty", items, rows)."""
        if request in self._takes:
            self._takes.pop(request).done(("empty", len(self._waiting), self._rows))
        elif request in self._puts:
            _refuse(*self._puts.pop(request), ("full",))
        self._advance()

    def ack(self, lease: RequestId) -> None:
        """Count the ranges of a lease as delivered."""
        if lease in self.leases:
            ranges, second = self.leases.pop(lease).ranges, int(self._clock())
            self._rates[1][second] += len(ranges)
            self._rates[2][second] += sum(self._items[units.number].bytes_in(units) for units in ranges)
            self._settle(ranges, "delivered")
            self._advance()

    def requeue(self, lease: RequestId, unreadable: Collection[int] = ()) -> list[Loss]:
        """Put the ranges of a lease back in their places. Return the losses of unreadable items."""
        losses: dict[str, Loss] = {}
        if lease in self.leases:
            self._restore(self.leases.pop(lease).ranges)
            lost = self._withdraw(lambda item: item.number in unreadable)
            self._lose(lost, "its bytes could not be read", losses)
            self._advance()
        return list(losses.values())

    def drop(self, reason: str, numbers: Collection[int] | None = None) -> int:
        """Drop waiting items, all or the given ones, and return the number of dropped ranges."""
        ranges = self._withdraw(lambda item: numbers is None or item.number in numbers)
        self._drop(ranges, reason)
        self._advance()
        return len(ranges)

    def expire(self, bound: StalenessState, surplus: Counter[int]) -> None:
        """Drop waiting rows that are too old, and by version the last ``surplus`` rows, which the staleness dropped."""
        self._drop_stale(bound, surplus)
        self._advance()

    def leave(self, peer: str) -> list[tuple[int, Any]]:
        """Reject further puts of a process.

        Return the numbers of its items that are needed, with the payloads that can be moved, and (-1, None) for each
        put that waits.
        """
        self._left.add(peer)
        taken = self._taken_numbers()
        stored = [item for item in self._items.values() if item.holder == peer]
        needed = [(item.number, None if item.number in taken else item.payload) for item in stored]
        return needed + [(-1, None) for request in self._puts if request[0] == peer]

    def move(self, number: int, payload: bytes) -> None:
        """Replace the payload of an item by its bytes, unless a consumer may read it at the moment."""
        if number in self._items and number not in self._taken_numbers():
            self._items[number].payload, self._items[number].holder = payload, None

    def _taken_numbers(self) -> set[int]:
        return {units.number for lease in self.leases.values() for units in lease.ranges}

    def peer_died(self, peer: str, why: str) -> None:
        """Requeue the leases of a dead process, and count the items lost whose bytes it stored."""
        self._died.setdefault(peer, why)
        puts = self._end_requests(why, peer)
        if puts:
            self._losses.setdefault(peer, Loss(peer, why)).puts += puts
        for lease in [lease for lease in self.leases if lease[0] == peer]:
            self._restore(self.leases.pop(lease).ranges)
        self._lose(self._withdraw(lambda item: item.holder == peer), why, self._losses)
        self._advance()

    def finish(self) -> None:
        """Reject further puts. Waiting items can still be taken."""
        self.ended = self.ended or _FINISHED
        self._advance()

    def close(self, reason: str) -> list[Loss]:
        """Drop waiting items, and answer every waiting request. Return the losses that no take has reported."""
        if self.closed:
            return []
        self.closed, self.ended = True, reason
        self._end_requests(reason)
        self._drop(self._withdraw(lambda item: True), reason)
        return self.losses

    def _end_requests(self, reason: str, peer: str | None = None) -> int:
        """Answer the waiting requests, all or those of a process. Return the number of puts."""
        puts = [self._puts.pop(request) for request in [*self._puts] if peer in (None, request[0])]
        takes = [self._takes.pop(request) for request in [*self._takes] if peer in (None, request[0])]
        for item, done in puts:
            _refuse(item, done, ("ended", reason))
        for take in takes:
            take.done(("ended", reason))
        return len(puts)

    # Reports

    @property
    def losses(self) -> list[Loss]:
        """Losses that no take has reported."""
        return list(self._losses.values())

    @property
    def items(self) -> ItemCounts:
        """Counts of items. An item that is partly taken and partly waiting counts as waiting."""
        waiting = len({units.number for units in self._waiting})
        return ItemCounts(**self._item_counts, waiting=waiting, taken=len(self._items) - waiting)

    @property
    def rows(self) -> ItemCounts:
        """Counts of rows."""
        ranges = (units for lease in self.leases.values() for units in lease.ranges)
        taken = sum(self._items[units.number].rows_in(units) for units in ranges)
        return ItemCounts(**self._row_counts, waiting=self._rows, taken=taken)

    @property
    def level(self) -> tuple[int, float]:
        """Number of waiting ranges, and the age of the oldest item in seconds."""
        oldest = self._clock() - self._items[self._waiting[0].number].at if self._waiting else 0.0
        return len(self._waiting), oldest

    def status(self) -> ChannelStatus:
        """Return counts, depth and consumers."""
        now = self._clock()
        accepted, delivered, nbytes = (self._per_second(counts, now) for counts in self._rates)
        depth = Depth(
            waiting=len(self._waiting),
            waiting_rows=self._rows,
            waiting_bytes=self._nbytes,
            taken=sum(len(lease.ranges) for lease in self.leases.values()),
            leases=len(self.leases),
            puts=len(self._puts),
            takes=len(self._takes),
            oldest_item=self.level[1],
            oldest_put=max((now - item.at for item, _ in self._puts.values()), default=0.0),
            oldest_take=max((now - take.at for take in self._takes.values()), default=0.0),
            oldest_lease=max((now - lease.at for lease in self.leases.values()), default=0.0),
            accepted_per_second=accepted,
            delivered_per_second=delivered,
            delivered_bytes_per_second=nbytes,
        )
        consumers = Counter(lease[0] for lease in self.leases)
        leaving = tuple({item.holder for item in self._items.values() if item.holder in self._left})
        return ChannelStatus(depth, self.items, self.rows, dict(self.reasons), consumers, leaving)

    def _per_second(self, counts: Counter[int], now: float) -> float:
        """Return the mean rate of the last ten seconds, and forget older seconds."""
        for second in [second for second in counts if second <= int(now) - _RATE_S]:
            del counts[second]
        return counts.total() / min(max(now - self._began, 1.0), _RATE_S)

    def state(self) -> dict[str, Any]:
        """Return the state to save, in which taken items wait again."""
        taken = [units for lease in self.leases.values() for units in lease.ranges]
        return {
            "items": {number: replace(item, bound=None) for number, item in self._items.items()},
            "ranges": sorted([*taken, *self._waiting]),
            "item_counts": Counter(self._item_counts),
            "row_counts": Counter(self._row_counts),
            "reasons": Counter(self.reasons),
            "losses": {holder: replace(loss) for holder, loss in self._losses.items()},
            "ended": None if self.closed else self.ended,
        }

    def restore(self, state: dict[str, Any], bound: StalenessState | None = None) -> None:
        """Continue from ``state``. Rows with versions are subject to ``bound``, which counts them as ready."""
        self._items, self._losses = dict(state["items"]), state["losses"]
        self._item_counts, self._row_counts = state["item_counts"], state["row_counts"]
        self.reasons, self.ended = state["reasons"], state["ended"]
        for item in self._items.values():
            item.bound, item.open_units = bound if item.versions else None, 0
            item.at = self._clock()  # the clock of the process that saved it was another one
        for units in state["ranges"]:
            self._items[units.number].open_units += units.stop - units.start
        self._insert(state["ranges"])
        self._advance()

    # Transitions

    def _advance(self) -> None:
        """Accept puts and serve takes until neither is possible."""
        while self._accept() or self._serve():
            pass

    def _accept(self) -> bool:
        if not self._puts:
            return False
        request, (item, done) = next(iter(self._puts.items()))
        if not self._has_capacity(item) and not self._is_short():
            return False
        del self._puts[request]
        item.number, item.open_units, item.at = self._item_counts["submitted"], item.size, self._clock()
        self._items[item.number] = item
        self._item_counts["submitted"] += 1
        self._row_counts["submitted"] += item.rows or 0
        self._rates[0][int(item.at)] += 1
        stale = frozenset[int]() if item.bound is None else item.bound.enter(item.versions)
        fresh, old = _split(RowRange(item.number, 0, item.size), stale)
        self._waiting.extend(self._adjust_totals(units, 1) for units in fresh)
        self._drop(old, STALE, frees_quota=False)
        done(("accepted", item.number, item.size - len(stale)))
        return True

    def _has_capacity(self, item: Item) -> bool:
        if self.maxsize is None or not self._waiting:
            return True
        if self.by == "bytes":
            return self._nbytes + item.nbytes <= self.maxsize
        return len(self._waiting) < self.maxsize

    def _is_short(self) -> bool:
        """Return whether the first take needs more than waits. Puts may then exceed ``maxsize``."""
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

    def _answer(self, request: RequestId, take: Take) -> tuple[Any, ...] | None:
        if self._losses:
            losses, self._losses = self.losses, {}
            return ("lost", losses)
        unfit = self._first_without_rows(take.most) if take.by_rows and self._rowless else None
        if unfit is not None:
            return ("unfit", unfit.number, unfit.producer)
        short = not self._is_enough(take)
        if short and (self.ended is None or self._puts):
            return None
        if self._waiting:
            return ("taken", self._take(request, take), short)
        return None if self._may_be_requeued() else ("ended", self.ended)

    def _first_without_rows(self, count: int) -> Item | None:
        """Return the first item among ``count`` rows that is not made of rows."""
        for units in self._waiting:
            item = self._items[units.number]
            if item.rows is None:
                return item
            count -= item.rows_in(units)
            if count <= 0:
                return None
        return None

    def _may_be_requeued(self) -> bool:
        """Return whether a consumer that waits for nothing has items that it may requeue."""
        waiting = {request[0] for request in self._takes}
        return not self.closed and any(lease[0] not in waiting for lease in self.leases)

    def _take(self, request: RequestId, take: Take) -> list[ItemSlice]:
        ranges: list[RowRange] = []
        left = take.most
        while left > 0 and self._waiting:
            units = self._adjust_totals(self._waiting.popleft(), -1)
            rows = self._items[units.number].rows_in(units) if take.by_rows else 1
            if rows > left:
                middle = units.start + left
                self._waiting.appendleft(self._adjust_totals(units._replace(start=middle), 1))
                units = units._replace(stop=middle)
            ranges.append(units)
            left -= rows
        self.leases[request] = Lease(ranges, self._clock())
        items = [self._items[units.number] for units in ranges]
        for item, units in zip(items, ranges, strict=True):
            if item.bound is not None:
                item.bound.take(item.versions_in(units))
        return [item.slice(units) for item, units in zip(items, ranges, strict=True)]

    def _restore(self, ranges: Sequence[RowRange]) -> None:
        """Return taken ranges to their places. Stale rows are dropped, rows of dead processes are lost."""
        for units in ranges:
            item = self._items[units.number]
            if item.bound is not None:
                item.bound.requeue(item.versions_in(units))
        self._insert(ranges)
        self._drop_stale()
        if self.closed:
            self._drop(self._withdraw(lambda item: True), self.ended or "")
        for holder in {self._items[units.number].holder for units in self._waiting} & self._died.keys():
            lost = self._withdraw(lambda item, holder=holder: item.holder == holder)
            self._lose(lost, self._died[holder or ""], self._losses)

    def _insert(self, ranges: Iterable[RowRange]) -> None:
        """Insert ranges in order. Adjacent ranges of an item are joined."""
        joined: deque[RowRange] = deque()
        ordered = sorted([*(self._adjust_totals(units, 1) for units in ranges), *self._waiting])
        for units in ordered:
            if joined and (joined[-1].number, joined[-1].stop) == units[:2]:
                joined[-1] = joined[-1]._replace(stop=units.stop)
            else:
                joined.append(units)
        self._waiting = joined

    def _withdraw(self, matches: Callable[[Item], bool]) -> list[RowRange]:
        """Remove and return the waiting ranges of matching items."""
        leaving = [units for units in self._waiting if matches(self._items[units.number])]
        if leaving:
            self._waiting = deque(units for units in self._waiting if not matches(self._items[units.number]))
        return [self._adjust_totals(units, -1) for units in leaving]

    def _drop_stale(self, bound: StalenessState | None = None, surplus: Counter[int] | None = None) -> None:
        """Drop waiting rows that are too old, and the last ``surplus`` rows. Their staleness dropped them before."""
        surplus = Counter() if surplus is None else surplus
        waiting, self._waiting = self._waiting, deque()
        dropped: list[RowRange] = []
        for units in reversed(waiting):
            item = self._items[units.number]
            stale = _stale_rows(item, units, surplus if item.bound is bound else Counter())
            fresh, old = _split(self._adjust_totals(units, -1), stale)
            self._waiting.extendleft(self._adjust_totals(part, 1) for part in reversed(fresh))
            dropped += old
        self._drop(dropped, STALE, frees_quota=False)

    def _drop(self, ranges: Sequence[RowRange], reason: str, *, frees_quota: bool = True) -> None:
        if ranges:
            self.reasons[reason] += len(ranges)
        self._settle(ranges, "dropped", frees_quota=frees_quota)

    def _lose(self, ranges: Sequence[RowRange], why: str, losses: dict[str, Loss]) -> None:
        numbers: set[int] = set()
        for units in ranges:
            item = self._items[units.number]
            holder = item.holder or item.producer
            loss = losses.setdefault(holder, Loss(holder, self._died.get(holder, why)))
            loss.items += units.number not in numbers
            loss.rows += item.rows_in(units)
            numbers.add(units.number)
        self._settle(ranges, "lost", frees_quota=True)

    def _settle(self, ranges: Iterable[RowRange], outcome: Outcome, *, frees_quota: bool = False) -> None:
        """Count ranges that are neither waiting nor taken any more. An item without open units is forgotten."""
        for units in ranges:
            item = self._items[units.number]
            if item.bound is not None and frees_quota:
                item.bound.remove(item.versions_in(units), f"{outcome} in the channel")
            item.open_units -= units.stop - units.start
            item.outcome = outcome if _SEVERITY[outcome] > _SEVERITY[item.outcome] else item.outcome
            self._row_counts[outcome] += item.rows_in(units)
            if item.open_units == 0:
                self._item_counts[item.outcome] += 1
                del self._items[units.number]
                self._reclaim(item)

    def _adjust_totals(self, units: RowRange, sign: int) -> RowRange:
        """Add a range to the totals of the waiting ranges, or subtract it, and return it."""
        item = self._items[units.number]
        self._rows += sign * item.rows_in(units)
        self._nbytes += sign * item.bytes_in(units)
        self._rowless += sign * (item.rows is None)
        return units


def _refuse(item: Item, done: Done, answer: tuple[Any, ...]) -> None:
    """Answer a put that is not accepted. Its rows free the quota of their staleness."""
    if item.bound is not None:
        item.bound.fail_put(len(item.versions))
    done(answer)


def _stale_rows(item: Item, units: RowRange, surplus: Counter[int]) -> set[int]:
    """Return the rows that are too old, and the last rows that are in surplus, which are counted down."""
    stale: set[int] = set()
    for row in reversed(range(units.start, units.stop) if item.bound is not None else ()):
        version = item.versions[row]
        if surplus[version] > 0:
            surplus[version] -= 1
            stale.add(row)
        elif item.bound is not None and version < item.bound.oldest:
            stale.add(row)
    return stale


def _split(units: RowRange, stale: Collection[int]) -> tuple[list[RowRange], list[RowRange]]:
    """Return the ranges of other rows, and the ranges of stale rows."""
    if not stale:
        return [units], []
    parts: tuple[list[RowRange], list[RowRange]] = [], []
    for row in range(units.start, units.stop):
        part = parts[row in stale]
        if part and part[-1].stop == row:
            part[-1] = part[-1]._replace(stop=row + 1)
        else:
            part.append(RowRange(units.number, row, row + 1))
    return parts
