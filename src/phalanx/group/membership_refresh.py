"""Views of a group in other processes learn who its ranks are when one of those refuses them, or has left."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import Endpoint, FetchFailed, RankOutcome
from phalanx.calls.submitter import DirectArrivals, DirectSubmitter, Outgoing, PendingResults
from phalanx.group.epoch import Epoch, GroupState
from phalanx.group.lifecycle import State
from phalanx.topology.slots import Slot
from phalanx.wire.messages import ANY_EPOCH, Message, ProcessInfo, RankCall

_MOST_REPEATS = 20


@dataclass(frozen=True)
class Member:
    """One rank as it travels."""

    slot: Slot
    handle: Any
    facts: ProcessInfo
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


def key_of(facts: ProcessInfo) -> tuple[int, float]:
    """What tells one process from another: its id, and when it reported."""
    return facts.pid, facts.started


def publish(life: GroupState, key: str) -> None:
    """Leave the roster where views of other processes look, after every change of members; "": there are none."""
    epoch = life.epoch
    if key and not life.closed:
        members = tuple(map(Member.of, epoch.endpoints[: epoch.size]))
        life.transport.publish(key, Roster(epoch.number, members, dict(life.in_peace_since)).to_bytes())


def withdraw(life: GroupState, key: str) -> None:
    """Take back what was left for views of other processes: the group is closed."""
    if key and life.transport.connected():
        life.transport.publish(key, None)


class MembershipCache:
    """What a view knows of the roster; ``key`` is where the owner leaves the newest one, while the group is open."""

    def __init__(self, life: GroupState, key: str) -> None:
        self._life = life
        self._key = key
        self._roster: Roster | None = None
        self._changed = False
        self._lock = threading.RLock()

    def note_change(self) -> bool:
        """Note that the ranks are others by now, or will be; False where the group is closed."""
        self._changed = True
        return self._life.transport.published(self._key) is not None

    def look(self) -> None:
        """Learn of the newest roster before a call is planned, where there is a sign of one."""
        life = self._life
        if self._changed or life.lifecycle.state is State.BROKEN or life.epoch.dead(life.transport):
            self.learn()

    def learn(self) -> None:
        """Read the newest roster, and go on with it; without one the group is closed."""
        with self._lock:
            found = self._life.transport.published(self._key)
            if found is None:
                self._life.begin_close()
                self._life.finish_close()
                return
            roster: Roster = pickle.loads(found)
            if roster.number <= self._life.epoch.number:
                return
            self._roster, self._changed = roster, False
            known = {key_of(one.facts): one for one in self._life.epoch.endpoints}
            for rank, endpoint in enumerate(known.values()):
                endpoint.retired = endpoint.retired or roster.left_in_peace(rank, endpoint)
            members = [known.get(key_of(one.facts)) or one.endpoint() for one in roster.members]
            self._life.told(members, roster.number)

    def refused(self, outcome: RankOutcome, rank: int, endpoint: Endpoint) -> bool:
        """Whether a rank did not begin a call, since the group has other ranks by now; learns of them then."""
        if outcome.failure is not None:
            if outcome.failure.report.kind != "stale":
                return False
            self.learn()
            return True
        if outcome.lost is None:
            return False
        self.learn()
        return self._roster is not None and self._roster.left_in_peace(rank, endpoint)


class RefreshingSubmitter(DirectSubmitter):
    """Door of a view: a call of one rank that was refused is sent again, to a rank of the newest roster.

    Refused calls of several ranks raise StaleEpoch: those that are gone may have begun the call.
    """

    def __init__(self, transport: Backend, follower: MembershipCache, life: GroupState) -> None:
        super().__init__(transport)
        self._following = transport, follower, life

    def submit(self, epoch: Epoch, call: Outgoing) -> PendingResults:
        if call.streaming is not None or len(call.ranks) != 1:
            return super().submit(epoch, call)
        call.messages = list(call.messages)
        return FollowingArrivals(super().submit(epoch, call), epoch, call, *self._following)


class FollowingArrivals(DirectArrivals):
    """PendingResults of a call of one rank. If the rank refused the call, it is sent again once its output is
    needed."""

    def __init__(
        self,
        sent: PendingResults,
        epoch: Epoch,
        call: Outgoing,
        transport: Backend,
        follower: MembershipCache,
        life: GroupState,
    ) -> None:
        super().__init__(transport, [sent.reference(0)])
        self._call, self._follower, self._life = call, follower, life
        self._number = epoch.number
        self._at = call.ranks[0], epoch.endpoints[call.ranks[0]]
        self._repeats = 0

    def fetch(self, timeout: float | None) -> list[Any]:
        while True:
            try:
                return super().fetch(timeout)
            except FetchFailed:
                if not self._again():
                    raise

    def output(self, position: int) -> Any:
        return self.fetch(None)[position]

    def outcome(self, position: int) -> RankOutcome:
        found = super().outcome(position)
        while not found.ok and self._again():
            super().wait([position], 1, None)
            found = super().outcome(position)
        return found

    def _again(self) -> bool:
        """Send the call again if its rank refused it. Return whether it was sent."""
        found = super().outcome(0)
        if found.ok or self._repeats >= _MOST_REPEATS:
            return False
        if not self._follower.refused(found, *self._at) or not self._is_there():
            return False
        self._repeats += 1
        self._send()
        return True

    def _is_there(self) -> bool:
        """Return whether a rank may run the call: any independent rank, or the same rank in a later epoch."""
        epoch = self._life.epoch
        if self._life.card.independent:
            return epoch.size > 0
        return epoch.number > self._number and self._call.ranks[0] < epoch.size

    def _send(self) -> None:
        epoch, call = self._life.epoch, self._call
        ((data, refs),) = call.messages
        number = ANY_EPOCH if self._life.card.independent else epoch.number
        message = Message(RankCall.unpack(data)._replace(epoch=number).pack(), refs)
        rank = call.ranks[0] % epoch.size
        again = Outgoing(call.role, call.method, [rank], [message], call.returns)
        ticket = DirectSubmitter(self._life.transport).submit(epoch, again).reference(0)
        self._number = epoch.number
        self._at = rank, epoch.endpoints[rank]
        DirectArrivals.__init__(self, self._life.transport, [ticket])
