"""Views of a group in other processes learn who its ranks are when one of those refuses them, or has left."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from phalanx.runtime.calls.door import Arrivals, DirectArrivals, DirectDoor, Outgoing
from phalanx.runtime.life.epoch import Epoch, GroupLife
from phalanx.topology.slots import Slot
from phalanx.transport.base import Transport
from phalanx.transport.values import Endpoint, FetchFailed, Outcome, Ticket
from phalanx.wire.messages import ANY_EPOCH, Facts, Message, RankCall
from phalanx.wire.outputs import HALVED

_MOST_REPEATS = 20


@dataclass(frozen=True)
class Member:
    """One rank as it travels."""

    slot: Slot
    handle: Any
    facts: Facts
    name: str | None
    since: int

    @staticmethod
    def of(endpoint: Endpoint) -> Member:
        return Member(endpoint.slot, endpoint.handle, endpoint.facts, endpoint.name, endpoint.since)

    def endpoint(self) -> Endpoint:
        return Endpoint(self.slot, self.handle, self.facts, self.name, since=self.since)


@dataclass(frozen=True)
class Roster:
    """The ranks of a group in an epoch, and which of those before them have left it in peace.

    ``in_peace_since``: by rank, the epoch since which all that came and are gone have; a rank that is not in it never
    lost a process. So it takes no more room however often ranks come and go.
    """

    number: int
    members: tuple[Member, ...]
    in_peace_since: Mapping[int, int]

    def left_in_peace(self, rank: int, endpoint: Endpoint) -> bool:
        """Whether a process that was that rank once, and is no member, ended what it had begun before it left."""
        return endpoint.since >= self.in_peace_since.get(rank, 0) and not any(
            key_of(one.facts) == key_of(endpoint.facts) for one in self.members
        )

    def to_bytes(self) -> bytes:
        return cloudpickle.dumps(self)


def key_of(facts: Facts) -> tuple[int, float]:
    """What tells one process from another: its id, and when it reported."""
    return facts.pid, facts.started


class Follower:
    """What a view knows of the roster; ``key`` is where the owner leaves the newest one."""

    def __init__(self, life: GroupLife, key: str, number: int) -> None:
        self._life = life
        self._key = key
        self.number = number
        self._roster: Roster | None = None

    def learn(self) -> None:
        """Read the newest roster, and go on with it."""
        found = self._life.transport.published(self._key)
        if found is None:
            return
        roster: Roster = pickle.loads(found)
        if roster.number <= self.number or self._life.closed:
            return
        self._roster = roster
        known = {key_of(one.facts): one for one in self._life.epoch.endpoints}
        for rank, endpoint in enumerate(known.values()):
            endpoint.retired = endpoint.retired or roster.left_in_peace(rank, endpoint)
        members = [known.get(key_of(one.facts)) or one.endpoint() for one in roster.members]
        self.number = roster.number
        self._life.change(members, len(members))

    def refused(self, outcome: Outcome, rank: int, endpoint: Endpoint) -> bool:
        """Whether a rank did not begin a call since the group has other ranks by now; learns of them then."""
        if outcome.failure is not None:
            if outcome.failure.report.kind != "stale":
                return False
            self.learn()
            return True
        if outcome.lost is None:
            return False
        self.learn()
        return self._roster is not None and self._roster.left_in_peace(rank, endpoint)


class FollowingDoor(DirectDoor):
    """The way of a view: what a rank refused goes to a rank of the newest roster."""

    def __init__(self, transport: Transport, follower: Follower, life: GroupLife) -> None:
        super().__init__(transport)
        self._following = transport, follower, life

    def submit(self, epoch: Epoch, call: Outgoing) -> Arrivals:
        if call.streaming is not None:
            return super().submit(epoch, call)
        call.messages = list(call.messages)
        tickets = super().submit(epoch, call)
        return FollowingArrivals(tickets, epoch, call, *self._following)


class FollowingArrivals(DirectArrivals):
    """Tickets of ranks; where one is a refusal, the call is made again on another rank, once that is asked for."""

    def __init__(
        self,
        sent: Arrivals,
        epoch: Epoch,
        call: Outgoing,
        transport: Transport,
        follower: Follower,
        life: GroupLife,
    ) -> None:
        tickets = [sent.reference(position) for position in range(len(sent))]
        super().__init__(transport, tickets, halved=call.returns == HALVED)
        self._call, self._follower, self._life = call, follower, life
        self._at = [(rank, epoch.endpoints[rank]) for rank in call.ranks]
        self._repeats = 0

    def fetch(self, timeout: float | None) -> list[Any]:
        while True:
            try:
                return super().fetch(timeout)
            except FetchFailed:
                everyone = range(len(self))
                ended, _ = super().wait(everyone, 1, 0)
                if not self._again(ended):
                    raise

    def output(self, position: int) -> Any:
        while True:
            try:
                return super().output(position)
            except FetchFailed:
                if not self._again([position]):
                    raise

    def outcome(self, position: int) -> Outcome:
        found = super().outcome(position)
        while not found.ok and self._again([position]):
            super().wait([position], 1, None)
            found = super().outcome(position)
        return found

    def _again(self, positions: Sequence[int]) -> bool:
        """Make the call again for those ranks that refused it; whether there was one."""
        again = False
        for position in positions:
            found = super().outcome(position)
            if found.ok or self._repeats >= _MOST_REPEATS:
                continue
            if self._follower.refused(found, *self._at[position]):
                self._repeats += 1
                self._put(position, *self._send(position))
                again = True
        return again

    def _send(self, position: int) -> tuple[Ticket, int, Endpoint]:
        epoch, call = self._life.epoch, self._call
        data, refs = list(call.messages)[position]
        message = Message(RankCall.unpack(data)._replace(epoch=ANY_EPOCH).pack(), refs)
        rank = call.ranks[position] % epoch.size
        arrivals = DirectDoor(self._life.transport).submit(
            epoch, Outgoing(call.role, call.method, [rank], [message], call.returns)
        )
        return arrivals.reference(0), rank, epoch.endpoints[rank]

    def _put(self, position: int, ticket: Ticket, rank: int, endpoint: Endpoint) -> None:
        tickets = [*self._tickets]
        tickets[position] = ticket
        self._at[position] = rank, endpoint
        DirectArrivals.__init__(self, self._life.transport, tickets, halved=self._call.returns == HALVED)
