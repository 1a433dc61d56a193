"""Serialization of group handles: the data that another process needs to call a group, and the rebuilding there."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import DeclarationError, GroupBroken
from phalanx.group.epoch import GroupCard
from phalanx.group.group import Group
from phalanx.group.roster import Roster, publish
from phalanx.session.session import session


@dataclass(frozen=True)
class PortableGroup:
    """A group as plain values and the backend's handles (Ray's actor handles pickle themselves).

    ``run`` is the id of the run whose process owns the group.
    """

    backend: str
    card: GroupCard
    roster: Roster
    roster_key: str
    run: str


def pack(core: Group) -> PortableGroup | LocalGroup:
    """Return the values from which another process makes a view of the group."""
    if core.backend.immediate:
        return LocalGroup(session.run_id, core.card.number, core.name)
    if core.has_pool:
        core.pool.keep()  # the remote view works even if no reference to the group is left here
    if not core.endpoints:
        with core.changing:  # wait for a restart in progress, which creates the endpoints
            pass
    if core.has_pool and not core.card.detached and not core.roster_key:
        core.roster_key = f"roster/{session.run_id}/{core.card.number}"
        publish(core)
    return PortableGroup(core.backend.name, core.card, Roster.of(core), core.roster_key, core.run)


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
        found = session.own_group(self.number) if self.run == session.run_id else None
        if found is None:
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
    if portable.run == session.run_id and (own := session.own_group(portable.card.number)) is not None:
        return own  # so that ranks see the calls of all its views here in one order
    endpoints = [member.endpoint() for member in portable.roster.members]
    backend = session.get_backend(portable.backend)
    core = Group(portable.card, backend, len(endpoints), owner=False, number=portable.roster.number)
    session.add_group(core)
    core.enter(endpoints)
    core.started()
    if not endpoints:
        text = f"group {portable.card.name!r} had no ranks when it was sent here: its restart had failed"
        core.broken(GroupBroken(text, group=portable.card.name))
    core.run, core.roster_key = portable.run, portable.roster_key
    core.spare = bool(core.roster_key)  # ranks that live are the owner's to end
    return core
