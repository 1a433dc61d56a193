"""Groups that travel: what another process needs to call a group, and how it is put together there."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import Endpoint
from phalanx.calls.submitter import DirectSubmitter, Outgoing, PendingResults
from phalanx.errors import DeclarationError, GroupBroken
from phalanx.group.epoch import Epoch, GroupCard
from phalanx.group.group import Group
from phalanx.group.live_groups import OpenGroup, open_groups, same_processes
from phalanx.group.membership_refresh import MembershipCache, RefreshingSubmitter, publish
from phalanx.session import session as cluster
from phalanx.session.session import RUN_ID
from phalanx.topology.slots import Slot
from phalanx.wire.messages import ProcessInfo


@dataclass(frozen=True)
class PortableGroup:
    """A group as plain values and the backend's handles (Ray's actor handles pickle themselves)."""

    backend: str
    card: GroupCard
    slots: tuple[Slot, ...]
    handles: tuple[Any, ...]
    facts: tuple[ProcessInfo, ...]
    names: tuple[str | None, ...]
    since: tuple[int, ...]
    roster: str = ""
    number: int = 0


def pack(core: Group) -> PortableGroup | LocalGroup:
    """Return the values from which another process makes a view of the group."""
    if core.transport.immediate:
        return LocalGroup(RUN_ID, core.card.number, core.name)
    if core.life.ground is not None:
        core.life.ground.keep()  # the view there is to work even if nobody here holds the group
    if not core.endpoints:
        with core.restarting:  # whoever makes its ranks anew is about to be done
            pass
    if core.owned is not None and not core.card.detached and not core.roster_key:
        core.roster_key = f"roster/{RUN_ID}/{core.card.number}"
        publish(core.life, core.roster_key)
    epoch = core.epoch
    present = epoch.endpoints[: epoch.size]
    return PortableGroup(
        backend=core.transport.name,
        card=core.card,
        slots=tuple(endpoint.slot for endpoint in present),
        handles=tuple(endpoint.handle for endpoint in present),
        facts=tuple(endpoint.facts for endpoint in present),
        names=tuple(endpoint.name for endpoint in present),
        since=tuple(endpoint.since for endpoint in present),
        roster=core.roster_key,
        number=epoch.number,
    )


@dataclass(frozen=True)
class LocalGroup:
    """A group whose ranks run in this process: the same group for code here, for example for another group's ranks."""

    run: str
    number: int
    name: str

    def find(self) -> Group:
        """Return the group.

        Raises:
            DeclarationError: this is another process, or the group no longer exists.
        """
        found = open_groups.numbered(self.number) if self.run == RUN_ID else None
        if not isinstance(found, Group):
            raise DeclarationError(
                f"group {self.name!r} runs in the process of its driver (backend 'inline') and cannot be used in "
                "another one; use the ray backend"
            )
        return found


def unpack(portable: PortableGroup | LocalGroup) -> Group:
    """Return the state of a view that does not own the group; of a group in this process, the group's own.

    Raises:
        DeclarationError: the group's ranks run in another process.
    """
    if isinstance(portable, LocalGroup):
        return portable.find()
    endpoints = [
        Endpoint(slot, handle, facts, name, since=since)
        for slot, handle, facts, name, since in zip(
            portable.slots, portable.handles, portable.facts, portable.names, portable.since, strict=True
        )
    ]
    transport = cluster.transport(portable.backend)
    core = Group(portable.card, transport, len(endpoints), owner=False, number=portable.number)
    core.life.enter(endpoints)
    core.life.started()
    if not endpoints:
        text = f"group {portable.card.name!r} had no ranks when it was sent here: its restart had failed"
        core.life.broken(GroupBroken(text, group=portable.card.name))
    owner = open_groups.owner_of(portable.card, portable.facts)
    if portable.roster:
        core.roster_key = portable.roster
        core.follower = MembershipCache(core.life, portable.roster)
        core.life.changed_elsewhere = core.follower.note_change
        core.rules = replace(core.rules, spare=True)  # ranks that live are the owner's to end
        core.door = RefreshingSubmitter(core.transport, core.follower, core.life)
    if owner is not None and not portable.card.independent:
        core.door = DoorOfOwner(core.transport, owner)
    return core


class DoorOfOwner(DirectSubmitter):
    """The way of a view in the very process that owns the group: the owner's, so that ranks see calls in one order.

    Once the owner has other processes, or is gone, it is the direct one.
    """

    def __init__(self, transport: Backend, owner: OpenGroup) -> None:
        super().__init__(transport)
        self._owner = weakref.ref(owner)

    def submit(self, epoch: Epoch, call: Outgoing) -> PendingResults:
        owner = self._owner()
        if owner is None:
            return super().submit(epoch, call)
        with owner.order:
            theirs = owner.life.epoch
            if not same_processes(theirs, [endpoint.facts for endpoint in epoch.endpoints]):
                return super().submit(epoch, call)
            return owner.door.submit(theirs, call)
