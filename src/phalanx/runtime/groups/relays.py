"""Which groups call their ranks through relays."""

from __future__ import annotations

from phalanx.config import settings
from phalanx.runtime.calls.relayed_door import RelayedDoor
from phalanx.runtime.groups.core import GroupCore
from phalanx.runtime.life.epoch import Epoch
from phalanx.runtime.life.lifecycle import State
from phalanx.topology.relays import HEADS
from phalanx.transport.base import Transport
from phalanx.transport.relaying import Relaying

_TAKES = (State.STARTING, State.READY)


def least_for(transport: Transport) -> int:
    """From how many ranks on groups of a backend have relays; 0: never."""
    own = transport.relay_from if isinstance(transport, Relaying) else 0
    return settings().relay_from if own is None else own


def use_relays(core: GroupCore, epoch: Epoch) -> None:
    """Have a large group of processes of their own call its ranks through relays, and start these for an epoch.

    Not one whose members change while they are at calls: these would have to end before other relays take over.
    """
    given = settings()
    transport = core.transport
    if (
        core.card.independent
        or core.card.detached
        or not isinstance(transport, Relaying)
        or not 0 < least_for(transport) <= epoch.size
    ):
        return  # relays end with this process, which detached ranks outlive
    if not isinstance(core.door, RelayedDoor):
        core.door = RelayedDoor(
            core.transport,
            transport,
            lambda: core.lifecycle.state in _TAKES,
            lambda: _end_held(core),
            turn=core.order,
            ordered=not core.card.asynchronous,
            fan_out=given.relay_fan_out,
            heads=min(HEADS, given.relay_fan_out),
        )
    core.door.prepare(epoch)


def _end_held(core: GroupCore) -> None:
    """Bring the calls that somebody holds to their ends, after a relay has ended.

    Raises:
        GroupBroken: one of them was lost with it.
    """
    for call in core.under_way.calls():
        call.conclude_now()
    core.lifecycle.check_callable()


def end_relays(core: GroupCore) -> None:
    """End the relays of a group, if it has any."""
    if isinstance(core.door, RelayedDoor):
        core.door.end()
