"""Groups that travel: what another process needs to call a group, and how it is put together there."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from phalanx.errors import DeclarationError
from phalanx.runtime.calls.door import Arrivals, DirectDoor, Outgoing
from phalanx.runtime.groups.core import GroupCore
from phalanx.runtime.groups.following import Follower, FollowingDoor
from phalanx.runtime.groups.open_groups import OpenGroup, open_groups, same_processes
from phalanx.runtime.life.epoch import Epoch, GroupCard
from phalanx.runtime.session import connection as cluster
from phalanx.runtime.session.connection import RUN_ID
from phalanx.topology.slots import Slot
from phalanx.transport.base import Transport
from phalanx.transport.values import Endpoint
from phalanx.wire.messages import Facts


@dataclass(frozen=True)
class PortableGroup:
    """A group as plain values and the backend's handles (Ray's actor handles pickle themselves)."""

    backend: str
    card: GroupCard
    slots: tuple[Slot, ...]
    handles: tuple[Any, ...]
    facts: tuple[Facts, ...]
    names: tuple[str | None, ...]
    since: tuple[int, ...]
    roster: str = ""
    number: int = 0


def pack(core: GroupCore) -> PortableGroup:
    """What a view of the group in another process is made from.

    Raises:
        DeclarationError: the group lives in this process only.
    """
    if core.transport.immediate:
        raise DeclarationError(
            f"group {core.name!r} runs in this process (backend {core.transport.name!r}) and cannot be sent to another "
            "one; use the ray backend"
        )
    if core.life.ground is not None:
        core.life.ground.keep()  # the view there is to work even if nobody here holds the group
    epoch = core.epoch
    present = epoch.endpoints[: epoch.size]
    if core.card.independent and core.life.owner and not core.card.detached:
        core.roster_key = f"roster/{RUN_ID}/{core.card.number}"
    number = epoch.number if core.follower is None else core.follower.number
    return PortableGroup(
        backend=core.transport.name,
        card=core.card,
        slots=tuple(endpoint.slot for endpoint in present),
        handles=tuple(endpoint.handle for endpoint in present),
        facts=tuple(endpoint.facts for endpoint in present),
        names=tuple(endpoint.name for endpoint in present),
        since=tuple(endpoint.since for endpoint in present),
        roster=core.roster_key,
        number=number,
    )


def unpack(portable: PortableGroup) -> GroupCore:
    """The shared part of a view that does not own the group."""
    endpoints = [
        Endpoint(slot, handle, facts, name, since=since)
        for slot, handle, facts, name, since in zip(
            portable.slots, portable.handles, portable.facts, portable.names, portable.since, strict=True
        )
    ]
    core = GroupCore(portable.card, cluster.transport(portable.backend), len(endpoints), owner=False)
    core.life.enter(endpoints)
    core.life.started()
    if portable.roster:
        core.roster_key = portable.roster
        core.follower = Follower(core.life, portable.roster, portable.number)
        core.door = FollowingDoor(core.transport, core.follower, core.life)
        return core
    owner = open_groups.owner_of(portable.card, portable.facts)
    if owner is not None:
        core.door = DoorOfOwner(core.transport, owner)
    return core


class DoorOfOwner(DirectDoor):
    """The way of a view in the very process that owns the group: the owner's, so that ranks see calls in one order.

    Once the owner has other processes, or is gone, it is the direct one.
    """

    def __init__(self, transport: Transport, owner: OpenGroup) -> None:
        super().__init__(transport)
        self._owner = weakref.ref(owner)

    def submit(self, epoch: Epoch, call: Outgoing) -> Arrivals:
        owner = self._owner()
        if owner is None:
            return super().submit(epoch, call)
        with owner.order:
            theirs = owner.life.epoch
            if not same_processes(theirs, [endpoint.facts for endpoint in epoch.endpoints]):
                return super().submit(epoch, call)
            return owner.door.submit(theirs, call)
