"""Who the ranks of a group are, published for its views in other processes.

The owner publishes a roster after every change of members. A view reads it when a rank refuses a call, since it is of a
later epoch, or has left.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass

import cloudpickle

from phalanx.backends.backend_types import Endpoint, RankOutcome
from phalanx.group.group import Group
from phalanx.group.lifecycle import State
from phalanx.wire.messages import ProcessInfo


@dataclass(frozen=True)
class Roster:
    """The ranks of a group in an epoch, and which earlier processes have left after finishing their calls.

    ``in_peace_since``: by rank, the epoch since which all processes of the rank that ended have finished their calls
    first; a missing rank never lost a process. So its size does not grow with the number of changes.
    """

    number: int
    members: tuple[Endpoint, ...]
    in_peace_since: Mapping[int, int]

    @staticmethod
    def of(group: Group) -> Roster:
        """Return the present roster of a group."""
        epoch = group.epoch
        return Roster(epoch.number, epoch.endpoints[: epoch.size], dict(group.in_peace_since))

    def left_in_peace(self, rank: int, endpoint: Endpoint) -> bool:
        """Return whether a former process of that rank finished its calls before it left."""
        return endpoint.since >= self.in_peace_since.get(rank, 0) and not any(
            key_of(one.facts) == key_of(endpoint.facts) for one in self.members
        )

    def to_bytes(self) -> bytes:
        return cloudpickle.dumps(self)


def key_of(facts: ProcessInfo) -> tuple[int, float]:
    """Return the identity of a process: its id, and when it reported."""
    return facts.pid, facts.started


def publish(group: Group) -> None:
    """Publish the roster, if the group has travelled; called after every change of members."""
    if group.roster_key and not group.closed:
        group.backend.publish(group.roster_key, Roster.of(group).to_bytes())


def withdraw(group: Group) -> None:
    """Withdraw the published roster, since the group is closed."""
    if group.roster_key and group.backend.connected():
        group.backend.publish(group.roster_key, None)


def look(group: Group) -> None:
    """Read the newest roster before a call of a view is planned, if there are signs of a change."""
    if group.is_doubtful or group.lifecycle.state is State.BROKEN or group.epoch.dead(group.backend):
        refresh(group)


def note_change(group: Group) -> bool:
    """Note that the ranks of a view are others by now, or will be. Return False where the group is closed."""
    group.is_doubtful = True
    return group.backend.published(group.roster_key) is not None


def refresh(group: Group) -> Roster | None:
    """Read the newest roster, and let the view continue with it. Without a roster the group is closed."""
    with group.changing:
        found = group.backend.published(group.roster_key)
        if found is None:
            group.begin_close()
            group.finish_close()
            return None
        roster: Roster = pickle.loads(found)
        if roster.number > group.epoch.number:
            known = {key_of(one.facts): one for one in group.endpoints}
            for rank, endpoint in enumerate(known.values()):
                endpoint.retired = endpoint.retired or roster.left_in_peace(rank, endpoint)
            group.follow([known.get(key_of(one.facts), one) for one in roster.members], roster.number)
        return roster


def was_refused(group: Group, outcome: RankOutcome, rank: int, endpoint: Endpoint) -> bool:
    """Return whether a rank did not begin a call of a view, since the group has other ranks by now."""
    if outcome.failure is not None:
        if outcome.failure.report.kind != "stale":
            return False
        refresh(group)
        return True
    if outcome.lost is None:
        return False
    roster = refresh(group)
    return roster is not None and roster.left_in_peace(rank, endpoint)
