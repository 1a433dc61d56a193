"""The home of a channel: order, counts and leases of its items, as a state machine. Pure.

Producer -> `Put` -> `Accepted` | `Refused`; consumer -> `Take` -> `Given(lease, parts)` -> the consumer fetches
the bytes from each part's holder -> `Ack` | `GiveBack` -> `Freed` tells the holders to let go. All events come
from, and all instructions go to, the link that runs the home (`runtime/links/channel.py`, `px.Channel`).

What holds after every event: submitted = delivered + dropped + lost + waiting + taken, in items and in rows; items
of one producer are given in the order in which it put them; requests are served in order of arrival. Two rules
keep it from standing still. A taker that waits for more than the channel holds opens it: puts are accepted beyond
`maxsize` until it is served. And an item larger than `maxsize` bytes is accepted when nothing else waits.

`maxsize` bounds what waits: leases do not count, so that a consumer may hold one batch while it waits for the next.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from phalanx.channels.channel_items import Cut, Item
from phalanx.channels.channel_messages import (
    Accepted,
    Ack,
    Cancel,
    Close,
    CloseProducer,
    Drop,
    Dropped,
    Ended,
    Event,
    Expired,
    Finish,
    Freed,
    GiveBack,
    Given,
    Gone,
    HandOver,
    Instruction,
    LeaseOver,
    Loss,
    Lost,
    Moved,
    Put,
    Refusal,
    Refused,
    Released,
    Take,
    Tick,
    Unfit,
    Unneeded,
    Withdrawn,
)
from phalanx.channels.channel_snapshots import By, ChannelState, Depth, Lease
from phalanx.channels.item_accounting import End, Ledger, Tally
from phalanx.channels.numbers import whole_number
from phalanx.channels.rates import Rates
from phalanx.channels.waiting_requests import Requests
from phalanx.errors import DeclarationError

UNREADABLE = "its bytes could not be read"


class ChannelHome:
    """The machine. `maxsize` items or bytes may wait, None: any number.

    Raises:
        DeclarationError: `maxsize` is no number from 1, or `by` is neither "items" nor "bytes".
    """

    def __init__(self, maxsize: int | None = None, by: By = "items") -> None:
        most = None if maxsize is None else whole_number(maxsize) or 0
        if most is not None and most < 1:
            raise DeclarationError(
                f"a channel of maxsize={maxsize!r}: give a whole number from 1, or None for no bound"
            )
        if by not in ("items", "bytes"):
            raise DeclarationError(f"a channel bounded by={by!r}: give 'items' or 'bytes'")
        self.maxsize = most
        self.by: By = by
        self.reasons: dict[str, int] = {}
        """Items, or parts of items, that were dropped, by reason."""
        self._ledger = Ledger()
        self._requests = Requests()
        self._leases: dict[int, Lease] = {}
        self._next_lease = 0
        self._closing: dict[str, bool] = {}
        """Producers that close, with whether they hand their bytes over."""
        self._released: set[str] = set()
        self._gone: dict[str, str] = {}
        """Why each process that is gone is gone."""
        self._losses: dict[str, Loss] = {}
        self._ended: str | None = None
        self._closed = False
        self._rates = Rates()

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event in, at `now` seconds of a clock that never goes back; what is to be done, in order.

        Raises:
            InternalError: the ticket of a request is that of another that waits.
        """
        done = [*self._changed(event, now), *self._flow(now)]
        while (request := self._requests.pop_due(now)) is not None:
            done += [self._expired(request), *self._flow(now)]
        return [*done, *self._release()]

    @property
    def wake_at(self) -> float | None:
        """When the next deadline passes: send a `Tick` then."""
        return self._requests.wake_at

    @property
    def items(self) -> Tally:
        """Where all accepted items are."""
        return self._ledger.items()

    @property
    def rows(self) -> Tally:
        """Where all accepted rows are."""
        return self._ledger.rows(self._taken())

    @property
    def leases(self) -> tuple[Lease, ...]:
        return tuple(self._leases.values())

    @property
    def losses(self) -> tuple[Loss, ...]:
        """What the next taker will be told is lost."""
        return tuple(self._losses.values())

    @property
    def ended(self) -> str | None:
        """Why it takes nothing in any more."""
        return self._ended

    @property
    def waiting_takes(self) -> tuple[Take, ...]:
        """Consumers that wait, in order of arrival."""
        return tuple(self._requests.takes)

    def is_closing(self, producer: str) -> bool:
        """Whether something of a producer that closes is still needed."""
        return producer in self._closing

    def depth(self, now: float) -> Depth:
        """How full it is, who waits, for how long, and how fast it flows."""
        return Depth.of(self._ledger, self.leases, self._requests, self._rates, now)

    def state(self) -> ChannelState:
        """What to save: a copy, in which all that is taken waits again and no request is left."""
        return ChannelState(
            self.maxsize,
            self.by,
            self._ledger.state(self._taken()),
            self._next_lease,
            self.losses,
            dict(self.reasons),
            self._ended,
            self._closed,
        )

    @classmethod
    def load(cls, state: ChannelState, holder: str) -> ChannelHome:
        """A channel that goes on from `state`, all whose bytes the process `holder` has now."""
        home = cls(state.maxsize, state.by)
        home._ledger = Ledger.load(state.ledger, holder)
        home._next_lease = state.next_lease
        home._losses = {loss.holder: loss for loss in state.losses}
        home.reasons = dict(state.reasons)
        home._ended, home._closed = state.ended, state.closed
        if home._closed:
            home._let_go(home._ledger.withdraw(lambda _: True), home._ended or "closed")
        return home

    def _changed(self, event: Event, now: float) -> list[Instruction]:
        match event:
            case Put():
                return self._put(event, now)
            case Take():
                self._requests.add(event, now)
            case Cancel():
                return [Withdrawn(event.ticket, self._requests.remove(event.ticket))]
            case Ack():
                return self._ack(event.lease, now)
            case GiveBack():
                return self._give_back(event)
            case Drop():
                return self._drop(event)
            case Gone():
                return self._process_gone(event)
            case CloseProducer():
                return self._close_producer(event)
            case Moved():
                return self._moved(event)
            case Finish():
                self._ended = self._ended or "finished"
            case Close():
                return self._close(event)
            case Tick():
                pass
        return []

    def _put(self, put: Put, now: float) -> list[Instruction]:
        why = self._refusal(put)
        if why is not None:
            return [Refused(put.ticket, why)]
        self._requests.add(put, now)
        return []

    def _refusal(self, put: Put) -> Refusal | None:
        if self._ended is not None:
            return "closed" if self._closed else "finished"
        if put.producer in self._closing or put.producer in self._released:
            return "producer closed"
        return "producer gone" if put.producer in self._gone or put.holder in self._gone else None

    def _ack(self, number: int, now: float) -> list[Instruction]:
        lease = self._leases.pop(number, None)
        if lease is None:
            return [LeaseOver(number)]
        self._rates.delivered.add(len(lease.parts), now)
        self._rates.delivered_bytes.add(sum(part.nbytes for part in lease.parts), now)
        return _freed(self._ledger.settle(lease.cuts, "delivered"), "delivered")

    def _give_back(self, event: GiveBack) -> list[Instruction]:
        lease = self._leases.pop(event.lease, None)
        return [LeaseOver(event.lease)] if lease is None else self._return(lease, event.unreadable)

    def _return(self, lease: Lease, unreadable: frozenset[int] = frozenset()) -> list[Instruction]:
        """What was taken waits again, unless its bytes are gone or the channel is closed."""
        unread = {part.item for part in lease.parts if part.item.number in unreadable}
        # What was moved since it was given can be read where it is now.
        gone = {item.number for item in unread if item.holder == self._ledger.item(item.number).holder}
        freed = self._lose([cut for cut in lease.cuts if cut.number in gone], UNREADABLE)
        readable = [cut for cut in lease.cuts if cut.number not in gone]
        if self._closed:
            return [*freed, *self._let_go(readable, self._ended or "closed")]
        self._ledger.restore(readable)
        holders = {part.item.holder for part in map(self._ledger.part, readable)}
        for process in holders & self._gone.keys():
            freed += self._lose_of(process)
        return freed

    def _drop(self, event: Drop) -> list[Instruction]:
        cuts = self._ledger.withdraw(lambda item: event.numbers is None or item.number in event.numbers)
        rows = sum(self._ledger.part(cut).rows for cut in cuts)
        freed = self._let_go(cuts, event.reason)
        return [Dropped(event.ticket, len(cuts), rows), *freed]

    def _let_go(self, cuts: Collection[Cut], reason: str) -> list[Instruction]:
        if cuts:
            self.reasons[reason] = self.reasons.get(reason, 0) + len(cuts)
        return _freed(self._ledger.settle(cuts, "dropped"), "dropped")

    def _process_gone(self, event: Gone) -> list[Instruction]:
        process = event.process
        self._gone.setdefault(process, event.why)
        self._closing.pop(process, None)
        self._note_loss(process, event.why, puts=self._requests.remove_of(process))
        done = self._lose_of(process)
        for lease in [lease for lease in self.leases if lease.consumer == process]:
            done += self._return(self._leases.pop(lease.number))
        return done

    def _lose_of(self, process: str) -> list[Instruction]:
        return self._lose(self._ledger.withdraw(lambda item: item.holder == process), self._gone[process])

    def _lose(self, cuts: Collection[Cut], why: str) -> list[Instruction]:
        """Taken cuts whose bytes nobody has: counted by holder, for the next taker to be told."""
        numbers: set[int] = set()
        for part in map(self._ledger.part, cuts):
            first = part.item.number not in numbers
            numbers.add(part.item.number)
            holder = part.item.holder
            self._note_loss(holder, self._gone.get(holder, why), items=int(first), rows=part.rows)
        return _freed(self._ledger.settle(cuts, "lost"), "lost")

    def _note_loss(self, holder: str, why: str, items: int = 0, rows: int = 0, puts: int = 0) -> None:
        if items or rows or puts:
            sofar = self._losses.get(holder, Loss(holder, why))
            self._losses[holder] = replace(
                sofar, items=sofar.items + items, rows=sofar.rows + rows, puts=sofar.puts + puts
            )

    def _close_producer(self, event: CloseProducer) -> list[Instruction]:
        if event.producer in self._gone or event.producer in self._released:
            return []
        self._closing[event.producer] = event.handoff or self._closing.get(event.producer, False)
        held = tuple(item for item in self._ledger.live if item.holder == event.producer)
        return [HandOver(event.producer, held)] if event.handoff and held else []

    def _moved(self, event: Moved) -> list[Instruction]:
        payloads = event.payloads.items()
        late = tuple(number for number, ref in payloads if not self._ledger.move(number, event.holder, ref))
        return [Unneeded(event.holder, late)] if late else []

    def _close(self, event: Close) -> list[Instruction]:
        if self._closed:
            return []
        self._closed, self._ended = True, event.reason
        puts, takes = self._requests.remove_all()
        answers = [Refused(put.ticket, "closed") for put in puts]
        answers += [Ended(take.ticket, event.reason) for take in takes]
        return [*answers, *self._let_go(self._ledger.withdraw(lambda _: True), event.reason)]

    def _flow(self, now: float) -> list[Instruction]:
        """Puts come in and takers are served, until neither goes on."""
        done: list[Instruction] = []
        while step := self._admit(now) or self._serve(now):
            done += step
        return done

    def _admit(self, now: float) -> list[Instruction]:
        put = self._requests.first_put
        if put is None or not (self._has_room(put) or self._is_short()):
            return []
        self._requests.remove(put.ticket)
        holder = put.holder or put.producer
        item = self._ledger.accept(put.producer, holder, put.payload, put.nbytes, put.rows, now)
        self._rates.accepted.add(1, now)
        handed = [HandOver(holder, (item,))] if self._closing.get(holder, False) else []
        return [Accepted(put.ticket, item.number), *handed]

    def _has_room(self, put: Put) -> bool:
        if self.maxsize is None or not len(self._ledger):
            return True
        if self.by == "bytes":
            return self._ledger.waiting_bytes + put.nbytes <= self.maxsize
        return len(self._ledger) < self.maxsize

    def _is_short(self) -> bool:
        """Whether the first taker waits for more than there is."""
        take = self._requests.first_take
        return take is not None and not self._is_enough(take)

    def _is_enough(self, take: Take) -> bool:
        if take.rows is not None:
            return self._ledger.waiting_rows >= take.rows
        return len(self._ledger) >= (take.items or 0)

    def _serve(self, now: float) -> list[Instruction]:
        take = self._requests.first_take
        answer = self._answer(take, now) if take is not None else None
        if take is None or answer is None:
            return []
        self._requests.remove(take.ticket)
        return [answer]

    def _answer(self, take: Take, now: float) -> Instruction | None:
        """What the first taker is told; None: it goes on waiting."""
        if self._losses:
            losses = self.losses
            self._losses.clear()
            return Lost(take.ticket, losses)
        unfit = self._ledger.first_without_rows(take.rows) if take.rows is not None else None
        if unfit is not None:
            return Unfit(take.ticket, unfit)
        if self._is_enough(take):
            return self._give(take, now)
        if self._ended is None or self._requests.first_put is not None:
            return None
        if len(self._ledger):
            return self._give(take, now, short=True)
        return None if self._may_come_back() else Ended(take.ticket, self._ended)

    def _may_come_back(self) -> bool:
        """Whether a consumer that does not itself wait for items has some that it may yet give back."""
        waiting = {take.consumer for take in self._requests.takes}
        return not self._closed and any(lease.consumer not in waiting for lease in self._leases.values())

    def _give(self, take: Take, now: float, short: bool = False) -> Given:
        cuts = self._ledger.take_rows(take.rows) if take.rows else self._ledger.take_items(take.items or 0)
        parts = tuple(self._ledger.part(cut) for cut in cuts)
        lease = Lease(self._next_lease, take.consumer, parts, now)
        self._leases[lease.number] = lease
        self._next_lease += 1
        return Given(take.ticket, lease.number, parts, short)

    def _expired(self, request: Put | Take) -> Instruction:
        if isinstance(request, Put):
            return Refused(request.ticket, "full")
        return Expired(request.ticket, len(self._ledger), self._ledger.waiting_rows)

    def _release(self) -> list[Instruction]:
        """Producers that close and of which nothing is needed any more."""
        if not self._closing:
            return []
        needed = {name for put in self._requests.puts for name in (put.producer, put.holder)}
        needed |= {item.holder for item in self._ledger.live}
        needed |= {part.item.holder for lease in self.leases for part in lease.parts}
        free = [producer for producer in self._closing if producer not in needed]
        for producer in free:
            del self._closing[producer]
        self._released.update(free)
        return [Released(producer) for producer in free]

    def _taken(self) -> list[Cut]:
        return [cut for lease in self._leases.values() for cut in lease.cuts]


def _freed(items: list[Item], end: End) -> list[Instruction]:
    return [Freed(tuple(items), end)] if items else []
