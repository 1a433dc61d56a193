"""Ranks are replaced, and states are restored: of all ranks from a snapshot, of new ranks from a peer, or none."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from phalanx.calls.health_check import seen_gone
from phalanx.errors import CallError, GroupBroken, PlacementError, WorkerDiedError
from phalanx.group.group import Group
from phalanx.group.lifecycle import State
from phalanx.group.snapshot_placement import Snapshot
from phalanx.members.processes import replace_processes, restart, settle
from phalanx.members.snapshots import check_held, from_peer, restore, take

_log = logging.getLogger("phalanx")
_SECONDS = 300.0


def replace_lost_ranks(core: Group, ranks: Sequence[int], state: str) -> tuple[int, ...]:
    """Replace ranks of a group that this process owns, and restore states; see ``px.replace_ranks``.

    Ranks on draining nodes are replaced too, since their slots move: no process is started on such nodes.

    Returns:
        The ranks that were replaced.

    Raises:
        GroupBroken: no rank has the state of a lost rank any more; the group is as it was.
        Errors of the constructors and of ``rejoin()``.
    """
    going = core.notices.ranks_to_move(core.epoch.nodes[: core.epoch.size])
    gone = tuple(sorted({*ranks, *going}))
    if len(gone) == core.world_size and (state != "none" or not core.endpoints):
        raise GroupBroken(
            f"px.replace_ranks({core.name}): all {core.world_size} ranks are to be replaced, so that nobody has their "
            "state. restart() makes them anew; px.load brings back what was saved",
            group=core.name,
            cause=core.lifecycle.cause,
        )
    found = check_held(core, gone) if state == "snapshot" else None

    def bring_back() -> None:
        if found is not None:
            restore(core, found, gone, _SECONDS)
        elif state == "peer":
            from_peer(core, gone, _SECONDS)

    replace_processes(core, gone, bring_back)
    if found is not None:
        _hold_again(core, found.without(gone))
    return gone


def _hold_again(core: Group, found: Snapshot) -> None:
    """Take a new snapshot, so that each state has its second copy again. Until then ``found`` says which have none."""
    core.snapshot = found
    # Another rank may be lost meanwhile, as it may be right after this.
    with contextlib.suppress(GroupBroken, WorkerDiedError):
        take(core)


def lost_ranks(core: Group) -> Sequence[int]:
    """Return the ranks that died: all ranks, if a start has left none.

    Ranks that the failure has named as dead count too, and ranks whose processes an inspection finds dead: not every
    loss is known at once, least of all the loss of a node.
    """
    if not core.endpoints:
        return range(core.world_size)
    cause = core.lifecycle.cause if core.lifecycle.state is State.BROKEN else None
    died = [one for one in cause.failures if one.kind == "died"] if isinstance(cause, CallError) else []
    nodes = core.epoch.nodes[: core.world_size]
    named = {one.rank for one in died}
    lost_nodes = {nodes[one.rank] for one in died if one.exit == "node lost" and one.rank < len(nodes)}
    with_them = (rank for rank, node in enumerate(nodes) if rank in named or node in lost_nodes)
    return sorted({*seen_gone(core), *with_them})


def heal(core: Group) -> None:
    """Replace the lost ranks of a broken group, or restart it if that is impossible.

    A group may be broken without a lost rank: a call reached some ranks only, or their connections were aborted when a
    call was cancelled. Then one rank is recreated, so that all ranks form their process groups again.

    Raises:
        Errors of ``px.replace_ranks`` and ``restart()``, if a constructor fails.
    """
    gone = lost_ranks(core)
    if not gone:
        settle(core, core.endpoints)
        gone = lost_ranks(core) or [core.world_size - 1]
    try:
        replace_lost_ranks(core, gone, "snapshot")
    except (GroupBroken, PlacementError) as error:
        _log.warning("group %r is restarted instead: %s", core.name, str(error).partition(". ")[0])
        restart(core)
