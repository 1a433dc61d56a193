"""The machine of bounded staleness with a naive account of every row, which checks each answer."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

from phalanx.channels.staleness_messages import (
    Accept,
    Accepted,
    Advance,
    Begin,
    Begun,
    Cancel,
    Discard,
    Drop,
    End,
    Event,
    Evicted,
    Expired,
    Instruction,
    Refused,
    Serve,
    Tick,
    Withdrawn,
)
from phalanx.channels.staleness_state import StalenessStateMachine
from phalanx.testing.clock import FakeClock


@dataclass
class ReadyRow:
    """One row that was accepted and not yet trained on."""

    lease: int
    place: int
    version: int


@dataclass
class CheckedStaleness:
    """Every event goes in through `send`, which raises where an answer contradicts the account."""

    machine: StalenessStateMachine
    clock: FakeClock = field(default_factory=FakeClock)
    asked: dict[int, Begin] = field(default_factory=dict)
    running: Counter[int] = field(default_factory=Counter)
    began_at: dict[int, int] = field(default_factory=dict)
    ready: list[ReadyRow] = field(default_factory=list)
    accepted_of: Counter[int] = field(default_factory=Counter)
    too_old: list[ReadyRow] = field(default_factory=list)
    """Ready rows of which the machine must say that they are evicted, and of no others."""
    submitted: int = 0
    dropped: int = 0
    lags: Counter[int] = field(default_factory=Counter)
    tickets: itertools.count[int] = field(default_factory=itertools.count)

    def begin(self, rows: int, patience: float | None = None) -> list[Instruction]:
        deadline = None if patience is None else self.clock.now() + patience
        begin = Begin(next(self.tickets), rows, deadline)
        self.asked[begin.ticket] = begin
        return self.send(begin)

    def accept(self, lease: int, versions: list[int]) -> list[Instruction]:
        before = len(self.ready)
        done = self.send(Accept(lease, len(versions), versions))
        places = {place for each in done if isinstance(each, Accepted) for place in each.places}
        refused = {place for each in done if isinstance(each, Refused) for place in each.places}
        assert places | refused == set(range(len(versions))) and not places & refused
        good = [versions[place] for place in sorted(places)]
        assert [row.version for row in self.ready[before:]] == good
        return done

    def send(self, event: Event) -> list[Instruction]:
        self._expect(event)
        done = self.machine.handle(event, self.clock.now())
        for instruction in done:
            self._check(event, instruction)
        assert not self.too_old
        self.check()
        return done

    def check(self) -> None:
        """What holds after every event."""
        rows = self.machine.rows
        assert rows.submitted == rows.accepted + rows.dropped + rows.running == self.submitted
        assert (rows.ready, rows.dropped, rows.running) == (
            len(self.ready),
            self.dropped,
            self.running.total(),
        )
        assert rows.trained == self.lags.total() and Counter(self.machine.lags) == self.lags
        machine = self.machine
        assert all(0 <= lag <= machine.max_lag for lag in self.lags)
        for place, row in enumerate(self.ready):
            assert machine.version + place // machine.rows_per_version - row.version <= machine.max_lag
        self._check_nobody_stands_still()

    def _check_nobody_stands_still(self) -> None:
        """Who waits, waits for a running lease, for the trainer, which has a full version, or for the engines."""
        machine = self.machine
        if self.asked and not self.running.total() and machine.serving == machine.version:
            assert len(self.ready) >= machine.rows_per_version

    def _expect(self, event: Event) -> None:
        match event:
            case Accept(lease, rows) if lease in self.running:
                self._end(lease, rows)
            case Drop(lease, rows) if lease in self.running:
                self.dropped += rows
                self._end(lease, rows)
            case End(lease):
                self.dropped += self.running.pop(lease, 0)
            case Discard(lease, start, stop):
                kept = [row for row in self.ready if row.lease != lease or not start <= row.place < stop]
                self.dropped += len(self.ready) - len(kept)
                self.ready = kept
            case Advance(version, trained):
                self._train(version, trained)
            case _:
                pass

    def _end(self, lease: int, rows: int) -> None:
        self.running[lease] -= rows
        if not self.running[lease]:
            del self.running[lease]

    def _train(self, version: int, trained: int | None) -> None:
        each = self.machine.rows_per_version
        wanted = (version - self.machine.version) * each if trained is None else trained
        for place, row in enumerate(self.ready[:wanted]):
            at = min(self.machine.version + place // each, version - 1)
            self.lags[at - row.version] += 1
        ready, self.ready = self.ready[wanted:], []
        for row in ready:
            fits = version + len(self.ready) // each - row.version <= self.machine.max_lag
            (self.ready if fits else self.too_old).append(row)

    def _check(self, event: Event, instruction: Instruction) -> None:
        match instruction:
            case Begun(ticket, lease, version):
                rows = self.asked.pop(ticket).rows
                self._check_limits(rows)
                self.submitted += rows
                self.running[lease], self.began_at[lease] = rows, version
                assert version == self.machine.serving
            case Accepted(lease, places):
                assert isinstance(event, Accept) and not isinstance(event.versions, int)
                for place in places:
                    self.ready.append(ReadyRow(lease, self.accepted_of[lease], event.versions[place]))
                    self.accepted_of[lease] += 1
            case Refused(_, places, "stale"):
                self.dropped += len(places)
            case Evicted(lease, start, stop):
                gone = [row for row in self.too_old if row.lease == lease and start <= row.place < stop]
                assert len(gone) == stop - start
                self.too_old = [row for row in self.too_old if row not in gone]
                self.dropped += len(gone)
            case Expired(ticket, behind):
                assert behind
                del self.asked[ticket]
            case Withdrawn(ticket, waited):
                assert (self.asked.pop(ticket, None) is not None) == waited
            case _:
                pass

    def _check_limits(self, rows: int) -> None:
        """The bound and the pace, unless what is under way cannot fill a version."""
        machine = self.machine
        under_way = len(self.ready) + self.running.total()
        if under_way >= machine.rows_per_version:
            ahead = min(machine.depth, machine.serving + machine.max_lag - machine.version)
            assert under_way + rows <= (ahead + 1) * machine.rows_per_version
        assert machine.version - machine.serving <= machine.max_lag

    def reload(self, *, with_ready: bool) -> None:
        """Save, and go on in a new machine."""
        self.machine = StalenessStateMachine.load(self.machine.state(), with_ready=with_ready)
        self.dropped += self.running.total() + (0 if with_ready else len(self.ready))
        self.running.clear()
        self.ready = self.ready if with_ready else []
        self.asked.clear()
        self.check()


class Loop:
    """Producers and a trainer around the machine, by number."""

    def __init__(self, max_lag: int, rows_per_version: int, depth: int) -> None:
        self.checked = CheckedStaleness(StalenessStateMachine(max_lag, rows_per_version, depth))

    @property
    def machine(self) -> StalenessStateMachine:
        return self.checked.machine

    def begin(self, rows: int, patience: float | None) -> None:
        self.checked.begin(1 + rows % self.most, patience)

    @property
    def most(self) -> int:
        return (self.machine.max_lag + 1) * self.machine.rows_per_version

    def accept(self, number: int, share: int, behind: int) -> None:
        """Some rows of a lease, the first tokens of which are of the version it began with, or later."""
        lease, running = self._lease(number)
        version = min(self.checked.began_at.get(lease, 0) + behind, self.machine.version)
        versions = [
            min(version + place % 2, self.machine.version) for place in range(max(running - share, 0))
        ]
        self.checked.accept(lease, versions)

    def drop(self, number: int, share: int) -> None:
        lease, running = self._lease(number)
        self.checked.send(Drop(lease, min(share, running), "filtered"))

    def end(self, number: int) -> None:
        self.checked.send(End(self._lease(number)[0], "ValueError"))

    def discard(self, number: int, start: int) -> None:
        leases = [row.lease for row in self.checked.ready] or [0]
        self.checked.send(Discard(leases[number % len(leases)], start, start + 2, "filtered later"))

    def cancel(self, number: int) -> None:
        asked = [*self.checked.asked, -1]
        self.checked.send(Cancel(asked[number % len(asked)]))

    def train(self) -> None:
        """One version in full, if there are the rows for it."""
        if len(self.checked.ready) >= self.machine.rows_per_version:
            self.checked.send(Advance(self.machine.version + 1))

    def advance(self, by: int, trained: int | None, serving: bool) -> None:
        """A version that was trained with fewer or more rows than agreed."""
        trained = None if trained is None else min(trained, len(self.checked.ready))
        self.checked.send(Advance(self.machine.version + by, trained, serving))

    def serve(self) -> None:
        self.checked.send(Serve(self.machine.version))

    def wait(self, seconds: float) -> None:
        self.checked.clock.advance(seconds)
        self.checked.send(Tick())

    def reload(self, with_ready: bool) -> None:
        self.checked.reload(with_ready=with_ready)

    def _lease(self, number: int) -> tuple[int, int]:
        leases = [*self.checked.running.items(), (1_000_000, 0)]
        return leases[number % len(leases)]
