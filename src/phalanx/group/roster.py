"""The roster of a group: who its ranks are, for its views in other processes and for later drivers.

It travels with a handle. From then on the owner publishes it after every change of members, that of a detached group
from the start. A view reads it when a rank refuses a call, since it is of a later epoch, or has left. ``px.attach``
begins with it.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass

import cloudpickle

from phalanx.backends.backend_types import Endpoint, RankOutcome
from phalanx.errors import DeclarationError
from phalanx.group.epoch import GroupCard
from phalanx.group.group import Group
from phalanx.group.lifecycle import State
from phalanx.topology.slots import Slot
from phalanx.wire.messages import ProcessInfo

#: Of a published roster: raised where a driver could not read what another version has left.
PROTOCOL = 5
_HEADER = b"phalanx group, protocol %d\n"
_HEADER_READ = re.compile(rb"phalanx group, protocol (\d+)\n")


@dataclass(frozen=True)
class Roster:
    """The ranks of a group in an epoch, and which earlier processes have left after finishing their calls.

    It is published as a line of bytes, which every version reads, and the pickled roster, which versions of the same
    protocol read.

    Attributes:
        backend: the name of the group's backend; its handles pickle themselves, as Ray's actor handles do.
        run: id of the run whose process owns the group.
        key: under which it is published; "": it is not.
        number: of the epoch.
        graceful_since: the epoch since which all processes that left have finished their calls first. So its size does
            not grow with the number of changes.
        reservations: the keys of the slots that the group's pool holds.
        extras: the keys of what is reserved beside the slots, by slot.
    """

    backend: str
    run: str
    key: str
    card: GroupCard
    number: int
    members: tuple[Endpoint, ...]
    graceful_since: int
    reservations: tuple[str, ...]
    extras: Mapping[Slot, str]

    @staticmethod
    def of(group: Group) -> Roster:
        """Return the present roster of a group."""
        epoch = group.epoch
        holdings = group.pool.holdings.values() if group.has_pool else ()
        return Roster(
            backend=group.backend.name,
            run=group.run,
            key=group.roster_key,
            card=group.card,
            number=epoch.number,
            members=epoch.endpoints[: epoch.size],
            graceful_since=group.graceful_since,
            reservations=tuple(key for holding in holdings for key in holding.reservation.keys),
            extras=dict(group.extras),
        )

    def left_gracefully(self, endpoint: Endpoint, number: int) -> bool:
        """Return whether a rank of the epoch of that number finished its calls before it left."""
        members = {key_of(member.facts) for member in self.members}
        return number >= self.graceful_since and key_of(endpoint.facts) not in members

    def to_bytes(self) -> bytes:
        return _HEADER % PROTOCOL + cloudpickle.dumps(self)

    @staticmethod
    def from_bytes(name: str, published: bytes) -> Roster:
        """Return the roster of the group of that name.

        Raises:
            DeclarationError: another version of the library started the group; nothing of its roster was unpickled.
        """
        head = _HEADER_READ.match(published)
        if head is None or int(head[1]) != PROTOCOL:
            raise DeclarationError(
                f"group {name!r} was started by another version of phalanx (protocol "
                f"{head[1].decode() if head else '1'}; here {PROTOCOL}); use the same version in both drivers"
            )
        return pickle.loads(memoryview(published)[head.end() :])


def key_of(facts: ProcessInfo) -> tuple[int, float]:
    """Return the identity of a process: its id, and when it reported."""
    return facts.pid, facts.started


def publish(group: Group) -> None:
    """Publish the members of a group that has travelled, or is detached; called after every change of members."""
    if group.roster_key and not group.closed:
        group.backend.publish(group.roster_key, Roster.of(group).to_bytes())


def withdraw(group: Group) -> None:
    """Withdraw the roster of a group, since it is closed; that of another group of its name stays."""
    if newest(group) is not None:
        group.backend.publish(group.roster_key, None)


def newest(group: Group) -> Roster | None:
    """Return the roster of a group that is published; None: none is, or that of another group of its name."""
    found = group.backend.published(group.roster_key) if group.roster_key else None
    if found is None or not found.startswith(_HEADER % PROTOCOL):
        return None
    roster = Roster.from_bytes(group.name, found)
    return roster if (roster.run, roster.card.number) == (group.run, group.card.number) else None


def detached_key(name: str) -> str:
    """Return the key of the roster of the detached group of that name."""
    return f"detached/{name}"


def look(group: Group) -> None:
    """Read the newest roster before a call of a view is planned, if there are signs of a change."""
    if group.is_doubtful or group.lifecycle.state is State.BROKEN or group.epoch.dead(group.backend):
        refresh(group)


def note_change(group: Group) -> bool:
    """Note that the ranks of a view are others by now, or will be. Return False where the group is closed."""
    group.is_doubtful = True
    return newest(group) is not None


def refresh(group: Group) -> Roster | None:
    """Read the newest roster, and let the view continue with it. Without a roster the group is closed."""
    with group.changing:
        roster = newest(group)
        if roster is None:
            group.begin_close()
            group.finish_close()
            return None
        if roster.number > group.epoch.number:
            known = {key_of(one.facts): one for one in group.endpoints}
            for endpoint in known.values():
                endpoint.retired = endpoint.retired or roster.left_gracefully(endpoint, group.epoch.number)
            group.follow([known.get(key_of(one.facts), one) for one in roster.members], roster.number)
        return roster


def was_refused(group: Group, outcome: RankOutcome, endpoint: Endpoint, number: int) -> bool:
    """Return whether a rank of an epoch did not begin a call of a view, since the group has other ranks by now."""
    if outcome.failure is not None:
        if outcome.failure.report.kind != "stale":
            return False
        refresh(group)
        return True
    if outcome.lost is None:
        return False
    roster = refresh(group)
    return roster is not None and roster.left_gracefully(endpoint, number)
