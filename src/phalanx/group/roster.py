"""The published roster of a group for its views in other processes, and the record of a detached group for drivers.

The owner publishes a roster after every change of members. A view reads it when a rank of a later epoch refuses a call,
or a rank has left. ``px.attach`` reads the record of a detached group.
"""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass, replace

import cloudpickle

from phalanx.backends.backend_types import Endpoint, RankOutcome
from phalanx.errors import DeclarationError
from phalanx.group.epoch import GroupHandle
from phalanx.group.group import Group
from phalanx.group.lifecycle import State
from phalanx.wire.messages import ProcessInfo

#: Version of the record of detached groups: increased if drivers cannot read the records of older versions.
PROTOCOL = 8
_HEADER = b"phalanx group, protocol %d\n"
_HEADER_READ = re.compile(rb"phalanx group, protocol (\d+)\n")


@dataclass(frozen=True)
class Roster:
    """The ranks of a group in an epoch, and the last former processes that a resize has asked to leave."""

    number: int
    members: tuple[Endpoint, ...]
    departed: frozenset[tuple[int, float]]

    @staticmethod
    def of(group: Group) -> Roster:
        """Return the present roster of a group."""
        epoch = group.epoch
        return Roster(epoch.number, epoch.endpoints[: epoch.size], frozenset(group.departed))


@dataclass(frozen=True)
class DetachedRecord:
    """Record of a detached group for later drivers, without handles of processes: its ``members`` lack them.

    ``reservations`` has the keys of its pool's reservations, ``extras`` the keys of resources reserved in addition to
    the slots. It is published as a header line, which every version can read, and the pickled record, which versions
    with the same protocol can read.
    """

    handle: GroupHandle
    members: tuple[Endpoint, ...]
    reservations: dict[str, tuple[str, ...]]
    extras: tuple[str, ...] = ()

    @staticmethod
    def of(group: Group) -> DetachedRecord:
        """Return the present record of a group."""
        members = tuple(replace(endpoint, handle=None) for endpoint in group.endpoints)
        keys = {key: tuple(held.reservation.keys) for key, held in group.pool.holdings.items()}
        return DetachedRecord(group.handle, members, keys, tuple(group.extras.values()))

    def to_bytes(self) -> bytes:
        return _HEADER % PROTOCOL + cloudpickle.dumps(self)

    @staticmethod
    def from_bytes(name: str, kept: bytes) -> DetachedRecord:
        """Return the record of the group of that name.

        Raises:
            DeclarationError: if a version with another protocol started the group; its record is not unpickled.
        """
        head = _HEADER_READ.match(kept)
        if head is None or int(head[1]) != PROTOCOL:
            raise DeclarationError(
                f"group {name!r} was started by another version of phalanx (protocol "
                f"{head[1].decode() if head else '1'}; here {PROTOCOL}); use the same version in both drivers"
            )
        return pickle.loads(memoryview(kept)[head.end() :])


def key_of(facts: ProcessInfo) -> tuple[int, float]:
    """Return the identity of a process: its id, and the time of its report."""
    return facts.pid, facts.started


def publish(group: Group) -> None:
    """Publish the members of a group that was serialized, or is detached; called after every change of members."""
    if group.roster_key and not group.closed:
        group.backend.publish(group.roster_key, cloudpickle.dumps(Roster.of(group)))
    if group.handle.detached and not group.closed:
        group.detached_record = DetachedRecord.of(group).to_bytes()
        group.backend.publish(detached_key(group.name), group.detached_record)


def withdraw(group: Group) -> None:
    """Withdraw the roster and the record of a closed group; a record of another group of its name stays."""
    if group.roster_key:
        group.backend.publish(group.roster_key, None)
    if group.handle.detached and group.backend.published(detached_key(group.name)) == group.detached_record:
        group.backend.publish(detached_key(group.name), None)


def detached_key(name: str) -> str:
    """Return the key of the record of the detached group of that name."""
    return f"detached/{name}"


def look(group: Group) -> None:
    """Read the newest roster before a call of a view is planned, if there are signs of a change."""
    if group.is_doubtful or group.lifecycle.state is State.BROKEN or group.epoch.dead(group.backend):
        refresh(group)


def note_change(group: Group) -> bool:
    """Note that ranks of a view were replaced, or will be. Return False if the group was closed."""
    group.is_doubtful = True
    return group.backend.published(group.roster_key) is not None


def refresh(group: Group) -> Roster | None:
    """Read and return the newest roster, and let the view continue with it. Without a roster, close the view."""
    with group.changing:
        found = group.backend.published(group.roster_key)
        if found is None:
            group.begin_close()
            group.finish_close()
            return None
        roster: Roster = pickle.loads(found)
        if roster.number > group.epoch.number:
            known = {key_of(one.facts): one for one in group.endpoints}
            for key in roster.departed.intersection(known):
                known[key].retired = True
            group.follow([known.get(key_of(one.facts), one) for one in roster.members], roster.number)
        return roster


def was_refused(group: Group, outcome: RankOutcome, endpoint: Endpoint) -> bool:
    """Return whether the process of a rank did not begin a call of a view, because the group has other ranks by now."""
    if outcome.failure is not None:
        if outcome.failure.report.kind != "stale":
            return False
        refresh(group)
        return True
    if outcome.lost is None or not outcome.lost.intended:  # it may have died of the call
        return False
    roster = refresh(group)
    return roster is not None and key_of(endpoint.facts) in roster.departed
