"""State machine of a channel: order, counts, leases and waiting requests. Pure: no threads, messages or clock.

A request is answered through its ``done`` callback, immediately or later, with a tuple whose first word is the kind.
Puts: ("accepted", number, rows), ("full",), ("ended", why). Takes: ("taken", slices, short), ("lost", losses),
("unfit", number, producer), ("empty", items, rows), ("ended", why).

After every call, in items and in rows: submitted = delivered + dropped + lost + waiting + taken. Items of a producer
are delivered in the order of its puts. Takes are served in the order of their arrival.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from phalanx.channels.channel_counts import ChannelStatus, Depth, ItemCounts, Loss, per_second
from phalanx.channels.channel_items import Item, ItemSlice, Outcome, RowRange, WaitingRows
from phalanx.channels.staleness_state import STALE, Done, StalenessState

By = Literal["items", "bytes"]
_SEVERITY: dict[Outcome, int] = {"delivered": 0, "dropped": 1, "lost": 2}
_FINISHED = "it was finished: nothing more is put"
_LEFT = "this process has left it and puts no more"


@dataclass(slots=True, eq=False)
class Request:
    """A put (``item``) or a take (``items`` or ``rows``) that waits."""

    peer: str
    done: Done
    at: float
    item: Item | None = None
    items: int | None = None
    rows: int | None = None
    at_least: int = 0
    lease: Hashable = None


@dataclass(slots=True)
class Lease:
    """Ranges that a consumer has taken, and the processes that store their bytes."""

    consumer: str
    ranges: list[RowRange]
    holders: frozenset[str]
    at: float


class ChannelState:
    """A channel in which at most ``maxsize`` items or bytes wait; None: no bound. Leases do not count.

    ``reclaim`` is called with items that have ended, so that their bytes can be freed.
    """

    def __init__(
        self,
        key: str = "",
        maxsize: int | None = None,
        by: By = "items",
        name: str = "",
        *,
        reclaim: Callable[[Item], None] = lambda item: None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.key, self.maxsize, self.by, self.name = key, maxsize, by, name
        self.reasons: Counter[str] = Counter()
        self.ended: str | None = None
        self.closed = False
        self.leases: dict[Hashable, Lease] = {}
        self._reclaim, self._clock = reclaim, clock
        self._items: dict[int, Item] = {}
        self._waiting = WaitingRows(self._items)
        self._puts: deque[Request] = deque()
        self._takes: deque[Request] = deque()
        self._losses: dict[str, Loss] = {}
        self._died: dict[str, str] = {}
        self._leaving: dict[str, list[Done]] = {}
        self._item_counts: Counter[str] = Counter()
        self._row_counts: Counter[str] = Counter()
        self._began = clock()
        self._rates: tuple[Counter[int], Counter[int], Counter[int]] = (Counter(), Counter(), Counter())
        """Accepted items, delivered ranges and delivered bytes, by second."""

    # Requests

    def put(self, item: Item, done: Done) -> Request | None:
        """Accept an item as soon as the channel has capacity. Return the request if it waits."""
        request = Request(item.producer, done, self._clock(), item=item)
        if self.ended is not None or item.producer in self._died or item.producer in self._leaving:
            done(("ended", self.ended or self._died.get(item.producer, _LEFT)))
        else:
            self._puts.append(request)
            self._advance()
        return request if request in self._puts else None

    def take(
        self,
        consumer: str,
        lease: Hashable,
        done: Done,
        items: int | None = None,
        rows: int | None = None,
        at_least: int | None = None,
    ) -> Request | None:
        """Lease items or rows as soon as there are enough. Return the request if it waits."""
        enough = at_least or items or rows or 1
        request = Request(consumer, done, self._clock(), None, items, rows, enough, lease)
        self._takes.append(request)
        self._advance()
        return request if request in self._takes else None

    def cancel(self, request: Request) -> None:
        """Answer a request that still waits with ("full",) or ("empty", items, rows)."""
        queue = self._takes if request.item is None else self._puts
        if request in queue:
            queue.remove(request)
            request.done(
                ("empty", len(self._waiting), self._waiting.rows) if request.item is None else ("full",)
            )
            self._advance()

    def ack(self, lease: Hashable) -> None:
        """Count the ranges of a lease as delivered."""
        found = self.leases.pop(lease, None)
        if found is not None:
            second = int(self._clock())
            self._rates[1][second] += len(found.ranges)
            self._rates[2][second] += sum(self._items[units.number].bytes_in(units) for units in found.ranges)
            self._settle(found.ranges, "delivered")
            self._advance()

    def requeue(self, lease: Hashable, unreadable: Collection[int] = ()) -> list[Loss]:
        """Put the ranges of a lease back in their places. Return the losses of unreadable items."""
        found = self.leases.pop(lease, None)
        losses: dict[str, Loss] = {}
        if found is not None:
            # An item whose bytes were moved since it was taken is readable again.
            lost = {number for number in unreadable if self._items[number].holder is not None}
            self._lose(
                [units for units in found.ranges if units.number in lost],
                "its bytes could not be read",
                losses,
            )
            self._restore([units for units in found.ranges if units.number not in lost])
            self._advance()
        return list(losses.values())

    def drop(self, reason: str, numbers: Collection[int] | None = None) -> int:
        """Drop waiting items, all or the given ones, and return the number of dropped ranges."""
        ranges = self._waiting.withdraw(lambda item: numbers is None or item.token[1] in numbers)
        self._drop(ranges, reason)
        self._advance()
        return len(ranges)

    def drop_rows(self, units: RowRange) -> None:
        """Drop the waiting rows of a range as stale."""
        self._drop_stale(lambda item, row: item.token[1] == units.number and units.start <= row < units.stop)
        self._advance()

    def expire(self) -> None:
        """Drop waiting rows whose version is older than their bound."""
        self._drop_stale(Item.is_stale)
        self._advance()

    def leave(self, peer: str, done: Done) -> None:
        """Reject further puts of a process, and answer ("left",) once none of its bytes is needed."""
        self._leaving.setdefault(peer, []).append(done)
        self._advance()

    def move(self, number: int, payload: bytes) -> None:
        """Replace the payload of an item by its bytes."""
        if number in self._items:
            self._items[number].payload, self._items[number].holder = payload, None
        self._advance()

    def held_by(self, process: str) -> list[tuple[int, Any]]:
        """Return number and payload of the items whose bytes a process stores."""
        return [(item.token[1], item.payload) for item in self._items.values() if item.holder == process]

    def peer_died(self, peer: str, why: str) -> None:
        """Requeue the leases of a dead process, and count the items lost whose bytes it stored."""
        self._died.setdefault(peer, why)
        self._leaving.pop(peer, None)
        puts = [request for request in self._puts if request.peer == peer]
        takes = [request for request in self._takes if request.peer == peer]
        self._puts = deque(request for request in self._puts if request.peer != peer)
        self._takes = deque(request for request in self._takes if request.peer != peer)
        for request in (*puts, *takes):
            request.done(("ended", why))
        if puts:
            self._losses.setdefault(peer, Loss(peer, why)).puts += len(puts)
        for key in [key for key, lease in self.leases.items() if lease.consumer == peer]:
            self._restore(self.leases.pop(key).ranges)
        self._lose(self._waiting.withdraw(lambda item: item.holder == peer), why, self._losses)
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
        requests, self._puts, self._takes = [*self._puts, *self._takes], deque(), deque()
        for request in requests:
            request.done(("ended", reason))
        self._drop(self._waiting.withdraw(lambda item: True), reason)
        self._advance()
        return self.losses

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
        return ItemCounts(**self._row_counts, waiting=self._waiting.rows, taken=taken)

    @property
    def level(self) -> tuple[int, float]:
        """Number of waiting ranges, and the age of the oldest item in seconds."""
        first = self._waiting.first
        return len(self._waiting), 0.0 if first is None else self._clock() - first.at

    def status(self) -> ChannelStatus:
        """Return counts, depth and consumers."""
        now = self._clock()
        accepted, delivered, nbytes = (per_second(rate, self._began, now) for rate in self._rates)
        depth = Depth(
            waiting=len(self._waiting),
            waiting_rows=self._waiting.rows,
            waiting_bytes=self._waiting.nbytes,
            taken=sum(len(lease.ranges) for lease in self.leases.values()),
            leases=len(self.leases),
            puts=len(self._puts),
            takes=len(self._takes),
            oldest_item=self.level[1],
            oldest_put=max((now - request.at for request in self._puts), default=0.0),
            oldest_take=max((now - request.at for request in self._takes), default=0.0),
            oldest_lease=max((now - lease.at for lease in self.leases.values()), default=0.0),
            accepted_per_second=accepted,
            delivered_per_second=delivered,
            delivered_bytes_per_second=nbytes,
        )
        consumers = Counter(lease.consumer for lease in self.leases.values())
        leaving = tuple(peer for peer, waiting in self._leaving.items() if waiting)
        return ChannelStatus(depth, self.items, self.rows, dict(self.reasons), consumers, leaving)

    def state(self) -> dict[str, Any]:
        """Return the state to save, in which taken items wait again."""
        taken = [units for lease in self.leases.values() for units in lease.ranges]
        return {
            "items": [replace(item, bound=None) for item in self._items.values()],
            "ranges": sorted([*taken, *self._waiting]),
            "item_counts": Counter(self._item_counts),
            "row_counts": Counter(self._row_counts),
            "reasons": Counter(self.reasons),
            "losses": [replace(loss) for loss in self.losses],
            "ended": None if self.closed else self.ended,
        }

    def restore(self, state: dict[str, Any], bound: StalenessState | None = None) -> None:
        """Continue from ``state``. Rows with versions are subject to ``bound``."""
        self._item_counts, self._row_counts = state["item_counts"], state["row_counts"]
        self.reasons, self.ended = state["reasons"], state["ended"]
        self._losses = {loss.holder: loss for loss in state["losses"]}
        for item in state["items"]:
            number = item.token[1]
            item.bound, item.token = bound if item.versions else None, (self.key, number)
            item.open_units = sum(
                units.stop - units.start for units in state["ranges"] if units.number == number
            )
            self._items[number] = item
        self._restore(state["ranges"])
        self._advance()

    # Transitions

    def _advance(self) -> None:
        """Accept puts and serve takes until neither is possible, then answer the processes that may leave."""
        while self._accept() or self._serve():
            pass
        if any(self._leaving.values()):
            needed = {item.holder for item in self._items.values()} | {put.peer for put in self._puts}
            needed |= {holder for lease in self.leases.values() for holder in lease.holders}
            for peer in self._leaving.keys() - needed:
                waiting, self._leaving[peer] = self._leaving[peer], []
                for done in waiting:
                    done(("left",))

    def _accept(self) -> bool:
        if not self._puts or not (self._has_capacity(self._puts[0].item) or self._is_short()):
            return False
        request = self._puts.popleft()
        item = request.item
        if item is None:
            return False
        number = self._item_counts["submitted"]
        item.token, item.open_units, item.at = (self.key, number), item.size, self._clock()
        self._items[number] = item
        self._item_counts["submitted"] += 1
        self._row_counts["submitted"] += item.rows or 0
        self._rates[0][int(item.at)] += 1
        stale = () if item.bound is None else item.bound.enter(item.token, item.versions)
        fresh, old = item.split(RowRange(number, 0, item.size), stale.__contains__)
        for units in fresh:
            self._waiting.append(units)
        self._drop(old, STALE)
        request.done(("accepted", number, item.size - len(stale)))
        return True

    def _has_capacity(self, item: Item | None) -> bool:
        if self.maxsize is None or not self._waiting or item is None:
            return True
        if self.by == "bytes":
            return self._waiting.nbytes + item.nbytes <= self.maxsize
        return len(self._waiting) < self.maxsize

    def _is_short(self) -> bool:
        """Return whether the first take needs more than waits. Puts may then exceed ``maxsize``."""
        return bool(self._takes) and not self._is_enough(self._takes[0])

    def _is_enough(self, take: Request) -> bool:
        return (self._waiting.rows if take.rows is not None else len(self._waiting)) >= take.at_least

    def _serve(self) -> bool:
        answer = self._answer(self._takes[0]) if self._takes else None
        if answer is None:
            return False
        self._takes.popleft().done(answer)
        return True

    def _answer(self, take: Request) -> tuple[Any, ...] | None:
        """Return the answer to the first take, None if it has to wait."""
        if self._losses:
            losses, self._losses = self.losses, {}
            return ("lost", losses)
        unfit = None if take.rows is None else self._waiting.first_without_rows(take.rows)
        if unfit is not None:
            return ("unfit", unfit.token[1], unfit.producer)
        short = not self._is_enough(take)
        if short and (self.ended is None or self._puts):
            return None
        if self._waiting:
            return ("taken", self._take(take), short)
        return None if self._may_return() else ("ended", self.ended)

    def _may_return(self) -> bool:
        """Return whether a consumer that waits for nothing has items that it may requeue."""
        waiting = {take.peer for take in self._takes}
        return not self.closed and any(lease.consumer not in waiting for lease in self.leases.values())

    def _take(self, take: Request) -> list[ItemSlice]:
        if take.rows is not None:
            ranges = self._waiting.take_rows(take.rows)
        else:
            ranges = self._waiting.take_items(take.items or 1)
        items = [self._items[units.number] for units in ranges]
        holders = frozenset(item.holder for item in items if item.holder is not None)
        self.leases[take.lease] = Lease(take.peer, ranges, holders, self._clock())
        for item, units in zip(items, ranges, strict=True):
            if item.bound is not None:
                item.bound.take(item.token, units.start, units.stop)
        return [item.slice(units) for item, units in zip(items, ranges, strict=True)]

    def _restore(self, ranges: Iterable[RowRange]) -> None:
        """Return taken ranges to their places. Stale rows are dropped, rows of dead processes are lost."""
        ranges = list(ranges)
        if self.closed:
            self._drop(ranges, self.ended or STALE)
            return
        for units in ranges:
            item = self._items[units.number]
            if item.bound is not None:
                item.bound.requeue(item.token, units.start, units.stop)
        self._waiting.insert(ranges)
        self._drop_stale(Item.is_stale)
        for holder in {self._items[units.number].holder for units in self._waiting} & self._died.keys():
            self._lose(
                self._waiting.withdraw(lambda item, h=holder: item.holder == h),
                self._died[holder or ""],
                self._losses,
            )

    def _drop_stale(self, is_stale: Callable[[Item, int], bool]) -> None:
        self._drop(self._waiting.withdraw_stale(is_stale), STALE)

    def _drop(self, ranges: Sequence[RowRange], reason: str) -> None:
        if ranges:
            self.reasons[reason] += len(ranges)
        self._settle(ranges, "dropped")

    def _lose(self, ranges: Sequence[RowRange], why: str, losses: dict[str, Loss]) -> None:
        numbers: set[int] = set()
        for units in ranges:
            item = self._items[units.number]
            holder = item.holder or item.producer
            loss = losses.setdefault(holder, Loss(holder, self._died.get(holder, why)))
            loss.items += units.number not in numbers
            loss.rows += item.rows_in(units)
            numbers.add(units.number)
        self._settle(ranges, "lost")

    def _settle(self, ranges: Iterable[RowRange], outcome: Outcome) -> None:
        """Count ranges that are neither waiting nor taken any more. An item without open units is forgotten."""
        for units in ranges:
            item = self._items[units.number]
            if item.bound is not None and outcome != "delivered":
                item.bound.remove(item.token, units.start, units.stop, f"{outcome} in the channel")
            item.open_units -= units.stop - units.start
            item.outcome = outcome if _SEVERITY[outcome] > _SEVERITY[item.outcome] else item.outcome
            self._row_counts[outcome] += item.rows_in(units)
            if item.open_units == 0:
                self._item_counts[item.outcome] += 1
                del self._items[units.number]
                self._reclaim(item)
