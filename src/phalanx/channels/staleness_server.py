"""The owner's side of bounded staleness: the machine of :mod:`phalanx.channels.staleness_state`, a clock, who holds
which lease.

Rows that were accepted and put into a channel by ``RowLease.put`` are followed there: what the channel loses or drops
gives its credit back, and what becomes too old to be trained on is dropped from the channel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.channels.channel_server import ChannelService
from phalanx.channels.services import Answer, Peer, services, shown
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
    Overdue,
    Serve,
    Tick,
    Withdrawn,
)
from phalanx.channels.staleness_state import Rows, StalenessState, StalenessStateMachine
from phalanx.channels.state_server import Home, is_of


@dataclass(frozen=True)
class Paced:
    """A staleness at one moment."""

    version: int
    serving: int
    rows: Rows
    waiting: int
    dropped: dict[str, int]
    lags: dict[int, int]
    restored: bool = False
    """It goes on from what was saved, and no version was in training since."""


@dataclass(frozen=True)
class Lies:
    """Rows ``start`` to ``stop`` of those that a lease accepted are an item of a channel."""

    lease: int
    start: int
    stop: int


@dataclass(frozen=True)
class SavedStaleness:
    """A staleness with the places of rows: by key of their channel and number of the item.

    ``follows``: rows are put by ``RowLease.put``, so that those which lie nowhere are on their way.
    """

    state: StalenessState
    lies: dict[tuple[str, int], Lies]
    follows: bool


class StalenessService(Home[StalenessStateMachine]):
    """The home of one staleness, as a service of this process."""

    def __init__(
        self,
        key: str,
        machine: StalenessStateMachine,
        *,
        clock: Callable[[], float] = time.monotonic,
        due_sooner: Callable[[], None] = lambda: None,
        alone: bool = False,
    ) -> None:
        super().__init__(key, machine, clock, due_sooner)
        self.alone = alone
        self._holders: dict[int, str] = {}
        self._accepted: dict[int, tuple[int, ...]] = {}
        self._lies: dict[tuple[str, int], Lies] = {}
        self._coming: dict[Lies, str] = {}
        """Accepted rows that are on their way into a channel, with who puts them."""
        self._evicted: list[tuple[int, int, int]] = []
        self._follows = False
        self.restored = False
        self._closed: str | None = None

    def ask(
        self, peer: Peer, ticket: Hashable, answer: Answer | None, verb: str, args: Sequence[Any]
    ) -> None:
        with self._lock:
            self._peers[peer.name] = peer
            told = self._told(peer.name, ticket, answer, verb, args)
        self._drop_evicted()
        if answer is not None and told is not None:
            answer(told)

    def _told(self, who: str, ticket: Hashable, answer: Answer | None, verb: str, args: Sequence[Any]) -> Any:
        """What is answered now; None where the machine answers."""
        if verb == "look":
            return self._look()
        if verb == "state":
            return self._machine.state()
        if verb == "unfollowed":
            self._coming.pop(args[0], None)
            return ("done",)
        if verb == "begin" and self._closed is not None:
            return ("gone", self._closed)
        if verb == "begin" and answer is not None:
            self._answers[ticket] = answer
        self._accepted.clear()
        before = self._accepted_of(args[0]) if verb == "offer" else 0
        try:
            self._do(self._event(who, ticket, verb, args))
        except ValueError as error:
            self._answers.pop(ticket, None)
            return ("wrong", str(error))
        self.restored = self.restored and verb != "advance"
        places = self._accepted.get(args[0], ()) if args else ()
        if verb == "accept":
            return ("accepted", places)
        if verb == "offer":
            lies = Lies(args[0], before, before + len(places))
            if places:
                self._coming[lies] = who
            return ("accepted", places, lies)
        return None if verb == "begin" else ("done",)

    def _event(self, who: str, ticket: Hashable, verb: str, args: Sequence[Any]) -> Event:
        match verb, args:
            case "begin", (rows, timeout):
                return Begin(ticket, rows, self._until(timeout))
            case "cancel", (number,):
                return Cancel((who, number))
            case "accept" | "offer", (lease, rows, versions):
                return Accept(lease, rows, versions)
            case "drop", (lease, rows, reason):
                return Drop(lease, rows, reason)
            case "end", (lease, reason):
                self._give_up([lies for lies in self._coming if lies.lease == lease], reason)
                return End(lease, reason)
            case "discard", (lies, reason):
                self._coming.pop(lies, None)
                return Discard(lies.lease, lies.start, lies.stop, reason)
            case "advance", (version, trained, serving):
                return Advance(version, trained, serving)
            case "serve", (version,):
                return Serve(version)
            case _:
                raise ValueError(f"a staleness was asked to {verb} with {len(args)} arguments")

    def left(self, peer: Peer, why: str) -> None:
        with self._lock:
            if self._peers.pop(peer.name, None) is None:
                return
            for ticket in [each for each in self._answers if is_of(each, peer.name)]:
                self._answers.pop(ticket)
                self._do(Cancel(ticket))
            for lease in [lease for lease, who in self._holders.items() if who == peer.name]:
                self._do(End(lease, f"{shown(peer.name)}: {why}"))
            coming = [lies for lies, who in self._coming.items() if who == peer.name]
            self._give_up(coming, f"{shown(peer.name)}: {why}")

    def _give_up(self, coming: Sequence[Lies], reason: str) -> None:
        """Accepted rows that come into no channel any more give their credit back."""
        for lies in coming:
            del self._coming[lies]
            self._do(Discard(lies.lease, lies.start, lies.stop, reason))

    def _accepted_of(self, number: int) -> int:
        return next((lease.accepted for lease in self._machine.leases if lease.number == number), 0)

    def _expire(self) -> None:
        self._do(Tick())

    def close(self, reason: str) -> None:
        """Let no rows begin any more, and tell those who wait."""
        with self._lock:
            self._closed = reason
            for ticket in list(self._answers):
                self._answer(ticket, ("gone", reason))
                self._do(Cancel(ticket))

    def state(self) -> StalenessState:
        """What to save of it."""
        with self._lock:
            return self._machine.state()

    def saved(self) -> SavedStaleness:
        """All that it is, with where the rows lie that were accepted."""
        with self._lock:
            return SavedStaleness(self._machine.state(), dict(self._lies), self._follows)

    def go_on_from(self, machine: StalenessStateMachine, lies: dict[tuple[str, int], Lies]) -> bool:
        """Have ``machine`` in place of this one, unless rows were begun; who waits is served from it."""
        with self._lock:
            if self._machine.rows.submitted:
                return False
            begins, self._machine = self._machine.waiting, machine
            self.restored = True
            for (channel, number), where in lies.items():
                self._follow_item(channel, number, where)
            for begin in begins:
                self._do(begin)
            return True

    def _look(self) -> Paced:
        machine = self._machine
        waiting = len(machine.waiting)
        return Paced(
            machine.version,
            machine.serving,
            machine.rows,
            waiting,
            dict(machine.dropped),
            dict(machine.lags),
            self.restored,
        )

    def follow(self, channel: str, number: int, lies: Lies) -> bool:
        """Rows that were accepted are an item of a channel now; False where they were let go of meanwhile."""
        with self._lock:
            if self._coming.pop(lies, None) is None:
                return False
            self._follow_item(channel, number, lies)
            return True

    def _follow_item(self, channel: str, number: int, lies: Lies) -> None:
        service = services.get(channel)
        if not isinstance(service, ChannelService):
            return
        self._lies[channel, number] = lies
        self._follows = True
        if self._undelivered not in service.undelivered:
            service.undelivered.append(self._undelivered)

    def _undelivered(self, channel: str, numbers: Sequence[int], end: str) -> None:
        with self._lock:
            for number in numbers:
                lies = self._lies.pop((channel, number), None)
                if lies is not None:
                    self._do(Discard(lies.lease, lies.start, lies.stop, f"{end} in the channel"))

    def _do(self, event: Event) -> None:
        for instruction in self._machine.handle(event, self._clock()):
            self._act(instruction)
        running = {lease.number for lease in self._machine.leases}
        self._holders = {lease: who for lease, who in self._holders.items() if lease in running}
        ready = self._machine.ready_leases | {lease for lease, *_ in self._evicted}
        self._lies = {place: lies for place, lies in self._lies.items() if lies.lease in ready}

    def _act(self, instruction: Instruction) -> None:
        match instruction:
            case Begun(ticket, lease, version):
                if isinstance(ticket, tuple):
                    self._holders[lease] = ticket[0]
                self._answer(ticket, ("begun", lease, version))
            case Expired(ticket, behind):
                self._answer(ticket, ("expired", behind))
            case Withdrawn(ticket, True):
                self._answer(ticket, ("withdrawn",))
            case Accepted(lease, places):
                self._accepted[lease] = places
            case Evicted(lease, start, stop):
                self._evicted.append((lease, start, stop))
            case Overdue(lease):
                peer = self._peers.get(self._holders.get(lease, ""))
                if peer is not None:
                    peer.tell(self._key, ("overdue", lease))
            case _:  # what was refused or dropped is counted
                pass

    def _drop_evicted(self) -> None:
        """Take items whose rows are all too old out of their channel; their credit is back already.

        Without the lock: the channel has one of its own, under which it tells of what it lost.
        """
        with self._lock:
            evicted, self._evicted = self._evicted, []
            for lease, start, stop in evicted:
                late = [
                    one
                    for one in self._coming
                    if one.lease == lease and start <= one.start and one.stop <= stop
                ]
                for one in late:  # they will not come in
                    del self._coming[one]
            items = [
                place
                for lease, start, stop in evicted
                for place, lies in self._lies.items()
                if lies.lease == lease and start <= lies.start and lies.stop <= stop
            ]
            for place in items:
                del self._lies[place]
        for channel, number in items:
            service = services.get(channel)
            if isinstance(service, ChannelService):
                service.drop([number], "stale")
