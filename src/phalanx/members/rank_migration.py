"""Ranks whose nodes go get new processes elsewhere, while the old ones can still tell their state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phalanx.errors import CheckpointError, GroupBroken, PlacementError
from phalanx.group.group import Group
from phalanx.members.auto_recovery import Moved
from phalanx.members.rank_replacement import replace_lost_ranks
from phalanx.members.snapshots import has_state, take

__all__ = ["move"]


def move(core: Group, ranks: Sequence[int], room: Callable[[], bool]) -> Moved:
    """Replace ranks that live, on nodes that stay, with their states of now; see ``px.ReplacePolicy``.

    Calls that were sent before end first.

    Where it cannot be done all is as it was, and the ranks are lost with their nodes, unless it can be done later.

    Raises:
        As the constructors and ``rejoin()``; the group is broken then.
    """
    if len(ranks) == core.world_size:
        why = "all of its ranks are there, so that none could keep their state; px.save before the deadline"
        return Moved(False, why)
    if not room():
        return Moved(False, "no other node has room for their slots", again=True)
    if _cannot_wait(core):
        return Moved(False, "calls are under way", again=True)
    stateful = has_state(core)  # after the calls before it
    try:
        if stateful:
            take(core)
    except CheckpointError as error:
        return Moved(False, f"no snapshot could be taken: {str(error).partition(chr(10))[0]}")
    try:
        replace_lost_ranks(core, ranks, "snapshot" if stateful else "none")
    except (GroupBroken, PlacementError) as error:
        # Where it is broken by that, it is mended as any broken group.
        return Moved(False, str(error).partition("\n")[0])
    return Moved(True)


def _cannot_wait(core: Group) -> bool:
    """Whether calls are under way that may need the driver to go on, or that a rank begins in any order."""
    calls = [call for call in core.under_way.calls() if not call.all_ended()]
    return bool(calls) and (core.card.asynchronous or any(call.streams is not None for call in calls))
