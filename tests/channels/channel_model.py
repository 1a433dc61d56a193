"""A channel's home together with a naive account of every unit, which checks each answer of the home."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

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
    Lost,
    Moved,
    Put,
    Refused,
    Released,
    Take,
    Tick,
    Unfit,
    Unneeded,
    Withdrawn,
)
from phalanx.channels.channel_snapshots import By
from phalanx.channels.channel_state import ChannelHome
from phalanx.testing.clock import FakeClock

Unit = tuple[int, int]
"""Number of an item and place in it."""


@dataclass
class Fact:
    """What the test knows of an item from the put that it asked for."""

    producer: str
    place: int
    holder: str
    rows: int | None
    nbytes: int

    @property
    def size(self) -> int:
        return max(self.rows or 0, 1)


@dataclass
class CheckedChannel:
    """Every event goes in through `send`, which raises where an answer contradicts the account."""

    home: ChannelHome
    clock: FakeClock = field(default_factory=FakeClock)
    facts: dict[int, Fact] = field(default_factory=dict)
    asked: dict[int, Put | Take] = field(default_factory=dict)
    """Requests without an answer."""
    waiting: set[Unit] = field(default_factory=set)
    leased: dict[int, set[Unit]] = field(default_factory=dict)
    lease_of: dict[int, str] = field(default_factory=dict)
    given_by: dict[int, dict[int, str]] = field(default_factory=dict)
    """By lease: who held each item when it was given."""
    ends: dict[str, set[Unit]] = field(
        default_factory=lambda: {"delivered": set(), "dropped": set(), "lost": set()}
    )
    freed: set[int] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    closing: set[str] = field(default_factory=set)
    released: set[str] = field(default_factory=set)
    told_lost: int = 0
    """Rows that takers were told are lost."""
    is_finished: bool = False
    handed: list[HandOver] = field(default_factory=list)
    is_closed: bool = False
    places: Counter[str] = field(default_factory=Counter)
    tickets: itertools.count[int] = field(default_factory=itertools.count)

    def put(self, producer: str, rows: int | None, nbytes: int, patience: float | None) -> list[Instruction]:
        place = self.places[producer]
        self.places[producer] += 1
        deadline = None if patience is None else self.clock.now() + patience
        may_put = producer not in self.gone | self.closing and not self.is_finished and not self.is_closed
        ticket = next(self.tickets)
        done = self.send(Put(ticket, producer, (producer, place), nbytes, rows, deadline))
        assert may_put or any(isinstance(each, Refused) and each.ticket == ticket for each in done)
        return done

    def take(
        self, consumer: str, items: int | None, rows: int | None, patience: float | None
    ) -> list[Instruction]:
        deadline = None if patience is None else self.clock.now() + patience
        return self.send(Take(next(self.tickets), consumer, items, rows, deadline))

    def send(self, event: Event) -> list[Instruction]:
        if isinstance(event, Put | Take):
            self.asked[event.ticket] = event
        self._expect(event)
        done = self.home.handle(event, self.clock.now())
        for instruction in done:
            self._check(instruction)
        self.check()
        return done

    def check(self) -> None:
        """What holds after every event."""
        assert self.home.items.is_balanced and self.home.rows.is_balanced
        leased = set().union(*self.leased.values())
        everything = [self.waiting, leased, *self.ends.values()]
        assert (
            sum(map(len, everything)) == len(set().union(*everything)) == sum(map(_size, self.facts.values()))
        )
        rows = {name: self._rows(units) for name, units in self.ends.items()}
        tally = self.home.rows
        assert (tally.delivered, tally.dropped, tally.lost) == tuple(rows.values())
        assert (tally.waiting, tally.taken) == (self._rows(self.waiting), self._rows(leased))
        assert tally.lost == self.told_lost + sum(loss.rows for loss in self.home.losses)
        assert self.home.items.submitted == len(self.facts)
        assert self.home.depth(self.clock.now()).waiting_bytes >= 0
        under_way = {number for number, _ in self.waiting | leased}
        assert self.freed == set(self.facts) - under_way
        self._check_nobody_stands_still()

    def _check_nobody_stands_still(self) -> None:
        puts = [request for request in self.asked.values() if isinstance(request, Put)]
        takes = [request for request in self.asked.values() if isinstance(request, Take)]
        assert not (puts and takes)
        assert not (puts and not self.waiting)
        if takes and takes[0].items:
            assert len({number for number, _ in self.waiting}) < takes[0].items
        if takes and takes[0].rows:
            assert self._rows(self.waiting) < takes[0].rows
        if takes and self.is_finished:
            others = {self.lease_of[lease] for lease in self.leased} - {take.consumer for take in takes}
            assert others and not self.waiting

    def _expect(self, event: Event) -> None:
        """Changes to the account that follow from the event alone."""
        match event:
            case Ack(lease) if lease in self.leased:
                self.ends["delivered"] |= self.leased.pop(lease)
            case GiveBack(lease, unreadable) if lease in self.leased:
                units = self.leased.pop(lease)
                holders = self.given_by[lease].items()
                moved = {n for n, holder in holders if self.facts[n].holder != holder}
                self._put_back(units, frozenset(unreadable) - moved)
            case Drop(numbers=numbers):
                out = {unit for unit in self.waiting if numbers is None or unit[0] in numbers}
                self.waiting -= out
                self.ends["dropped"] |= out
            case Gone(process):
                self.gone.add(process)
                self._forget_requests(process)
                self._lose({unit for unit in self.waiting if self.facts[unit[0]].holder == process})
                for lease in [lease for lease in self.leased if self.lease_of[lease] == process]:
                    self._put_back(self.leased.pop(lease), frozenset())
            case Moved(holder, payloads):
                for number in payloads:
                    if number not in self.freed:
                        self.facts[number].holder = holder
            case CloseProducer(producer):
                self.closing.add(producer)
            case Finish():
                self.is_finished = True
            case Close() if not self.is_closed:
                self.is_closed = True
                self.ends["dropped"] |= self.waiting
                self.waiting = set()
            case _:
                pass

    def _put_back(self, units: set[Unit], unreadable: frozenset[int]) -> None:
        self.waiting |= units
        self._lose({unit for unit in units if unit[0] in unreadable})
        if self.is_closed:
            self.ends["dropped"] |= self.waiting
            self.waiting = set()
        self._lose({unit for unit in self.waiting if self.facts[unit[0]].holder in self.gone})

    def _lose(self, units: set[Unit]) -> None:
        self.waiting -= units
        self.ends["lost"] |= units

    def _forget_requests(self, process: str) -> None:
        mine = {
            ticket
            for ticket, request in self.asked.items()
            if process in (getattr(request, "producer", None), getattr(request, "consumer", None))
        }
        for ticket in mine:
            del self.asked[ticket]

    def _check(self, instruction: Instruction) -> None:
        match instruction:
            case Accepted(ticket, number):
                put = self.asked.pop(ticket)
                assert isinstance(put, Put) and number == len(self.facts)
                producer, place = put.payload
                fact = Fact(producer, place, producer, put.rows, put.nbytes)
                earlier = [each.place for each in self.facts.values() if each.producer == producer]
                assert all(other < place for other in earlier)
                self.facts[number] = fact
                self.waiting |= {(number, unit) for unit in range(fact.size)}
            case Given(ticket, lease, parts, short):
                take = self.asked.pop(ticket)
                assert isinstance(take, Take)
                units = [(p.item.number, unit) for p in parts for unit in range(p.cut.start, p.cut.stop)]
                assert units and units == sorted(self.waiting)[: len(units)]
                assert all(part.item.holder == self.facts[part.item.number].holder for part in parts)
                rows, items = sum(part.rows for part in parts), len(parts)
                assert rows == sum(1 for number, _ in units if self.facts[number].rows)
                assert short or (take.rows is None or rows == take.rows)
                assert short or (take.items is None or items == take.items)
                self.waiting -= set(units)
                self.leased[lease], self.lease_of[lease] = set(units), take.consumer
                self.given_by[lease] = {part.item.number: part.item.holder for part in parts}
            case Freed(items):
                numbers = {item.number for item in items}
                assert not numbers & self.freed
                self.freed |= numbers
            case Lost(ticket, losses):
                del self.asked[ticket]
                assert losses
                self.told_lost += sum(loss.rows for loss in losses)
            case Refused(ticket) | Expired(ticket) | Ended(ticket) | Unfit(ticket):
                del self.asked[ticket]
            case Withdrawn(ticket, waited):
                assert (self.asked.pop(ticket, None) is not None) == waited
            case HandOver():
                self.handed.append(instruction)
            case Released(producer):
                assert producer not in {self.facts[number].holder for number in set(self.facts) - self.freed}
                self.released.add(producer)
            case _:
                assert isinstance(instruction, Dropped | LeaseOver | Unneeded)

    def _rows(self, units: set[Unit]) -> int:
        return sum(1 for number, _ in units if self.facts[number].rows)

    def reload(self) -> None:
        """Save, and go on in a new home that has all the bytes."""
        self.home = ChannelHome.load(self.home.state(), "home")
        for number, fact in self.facts.items():
            fact.holder = "home" if number not in self.freed else fact.holder
        for units in self.leased.values():
            self.waiting |= units
        self.leased.clear()
        self.asked.clear()
        self.gone.clear()
        self.closing.clear()
        self.check()


def _size(fact: Fact) -> int:
    return fact.size


class Actors:
    """Three producers and three consumers at a channel, by number; one that is gone comes again under a new name."""

    def __init__(self, maxsize: int | None, by: By) -> None:
        self.channel = CheckedChannel(ChannelHome(maxsize, by))
        self._lives: Counter[str] = Counter()

    def producer(self, number: int) -> str:
        return self._name(f"producer {number}")

    def consumer(self, number: int) -> str:
        return self._name(f"consumer {number}")

    def put(self, number: int, rows: int | None, nbytes: int, patience: float | None) -> None:
        self.channel.put(self.producer(number), rows, nbytes, patience)

    def take(self, number: int, count: int, by_rows: bool, patience: float | None) -> None:
        items, rows = (None, count) if by_rows else (count, None)
        self.channel.take(self.consumer(number), items, rows, patience)

    def cancel(self, number: int) -> None:
        """A request that waits, or one that never did."""
        asked = [*self.channel.asked, -1]
        self.channel.send(Cancel(asked[number % len(asked)]))

    def acknowledge(self, number: int) -> None:
        """A lease that runs, or one that is over."""
        self.channel.send(Ack(self._lease(number)))

    def give_back(self, number: int, unreadable: bool) -> None:
        lease = self._lease(number)
        numbers = sorted({each for each, _ in self.channel.leased.get(lease, ())})
        self.channel.send(GiveBack(lease, frozenset(numbers[:1] if unreadable else ())))

    def drop(self, number: int) -> None:
        waiting = sorted({each for each, _ in self.channel.waiting})
        chosen = None if number % 5 == 0 else frozenset(waiting[number % 3 :: 2])
        self.channel.send(Drop("drop", "by request", chosen))

    def kill(self, number: int) -> None:
        kind = ("producer", "consumer")[number % 2]
        name = self._name(f"{kind} {number // 2}")
        self._lives[name.partition(".")[0]] += 1
        self.channel.send(Gone(name, "signal SIGKILL"))
        self.channel.put(name, 1, 1, None)  # one that was under way when it died

    def close_producer(self, number: int, handoff: bool) -> None:
        self.channel.send(CloseProducer(self.producer(number), handoff))

    def hand_over(self) -> None:
        """The bytes asked for last are at the home now."""
        if self.channel.handed:
            numbers = [item.number for item in self.channel.handed.pop().items]
            self.channel.send(Moved("home", dict.fromkeys(numbers, "copy")))

    def finish(self) -> None:
        self.channel.send(Finish())

    def close(self) -> None:
        self.channel.send(Close())

    def wait(self, seconds: float) -> None:
        self.channel.clock.advance(seconds)
        self.channel.send(Tick())

    def reload(self) -> None:
        if not self.channel.is_closed:
            self.channel.reload()

    def _lease(self, number: int) -> int:
        leases = [*self.channel.leased, 1_000_000]
        return leases[number % len(leases)]

    def _name(self, base: str) -> str:
        while f"{base}.{self._lives[base]}" in self.channel.released:
            self._lives[base] += 1
        return f"{base}.{self._lives[base]}"
