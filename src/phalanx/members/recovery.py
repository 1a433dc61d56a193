"""Recovery of a group when it is next called: it is broken, or nodes with ranks of it will be taken away.

Lost ranks are replaced, and states restored: of all ranks from a snapshot, of new ranks from a peer, or none. Also the
return to a snapshot, ``px.restore``.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Sequence

from phalanx.calls.health_check import seen_gone
from phalanx.calls.in_flight import calls_of, make_room
from phalanx.calls.run_on import run_on
from phalanx.errors import (
    CallError,
    CheckpointError,
    GroupBroken,
    PhalanxError,
    PlacementError,
    WorkerDiedError,
)
from phalanx.group import roster
from phalanx.group.group import Group
from phalanx.group.lifecycle import State
from phalanx.group.options import ReplacePolicy, RestartPolicy
from phalanx.group.preemption_notices import look_once
from phalanx.group.snapshot_placement import Snapshot
from phalanx.members.processes import replace_processes, restart, settle
from phalanx.members.snapshots import check_held, from_peer, has_state, in_one_order, restore, take
from phalanx.pools.pool import ResourcePool
from phalanx.topology.placement import check_feasible
from phalanx.worker import handlers

_AGAIN_AFTER_S = 1.0
_log = logging.getLogger("phalanx")


def ensure_ready(core: Group) -> None:
    """Recover a broken group, or move its ranks off draining nodes, if its policy says so; learn of a newer roster.

    Called before a call is planned, and never by a thread that holds ``send_lock`` or the lock of a sync.
    """
    if core.is_view:
        roster.look(core)
    if len(core.recent) >= core.max_in_flight:
        make_room(core)  # may take long, and the group may break: first
    if core.lifecycle.state is State.BROKEN or core.notices.urgent:
        _recover(core)


def _recover(core: Group) -> None:
    policy = core.options.on_failure
    if policy is None:
        core.notices.urgent = False
        return
    with core.changing:
        if core.is_changed_here:
            return
        with core.as_it_is():  # moving and recovering makes calls itself
            if core.notices.urgent:
                _move_away(core, policy)
            while core.lifecycle.state is State.BROKEN and _has_recovered(core, policy):
                pass  # it may have lost another rank by then


def _has_recovered(core: Group, policy: RestartPolicy | ReplacePolicy) -> bool:
    """Recover it. Return False where the policy does not allow that once more."""
    if _was_preempted(core):
        if isinstance(policy, ReplacePolicy) and not policy.allows_preemption(core.preemptions):
            core.lifecycle.remark = (
                f"{policy} does not allow another preemption: {core.preemptions} were mended."
            )
            return False
        core.preemptions += 1
        why = "since its ranks lost their nodes as was announced"
    else:
        now = core.backend.now()
        core.recoveries = policy.recent(core.recoveries, now)
        if not policy.allows(core.recoveries, now):
            what = "restart" if isinstance(policy, RestartPolicy) else "replacement"
            core.lifecycle.remark = (
                f"{policy} does not allow another {what} now: {len(core.recoveries)} were made."
            )
            return False
        core.recoveries.append(now)
        why = f"after: {_first_line(core.lifecycle.cause)}"
    if isinstance(policy, ReplacePolicy):
        _log.warning("group %r gets new processes for the ranks that it lost, %s", core.name, why)
        heal(core)
    else:
        _log.warning("group %r is restarted %s", core.name, why)
        restart(core)
    return True


def _was_preempted(core: Group) -> bool:
    """Return whether the group broke because nodes were taken away as was announced: no failure of it."""
    cause, nodes = core.lifecycle.cause, core.epoch.nodes
    ranks = cause.cause_ranks if isinstance(cause, WorkerDiedError) else ()
    if not ranks or max(ranks) >= len(nodes):
        return False
    look_once(core)
    return core.notices.explains([nodes[rank] for rank in ranks])


def _move_away(core: Group, policy: RestartPolicy | ReplacePolicy) -> None:
    """Give ranks whose nodes go new processes elsewhere, if the policy wants that."""
    if core.backend.now() < core.move_after:
        return
    core.notices.urgent = False
    ranks = core.notices.ranks_to_move(core.epoch.nodes[: core.epoch.size])
    # The recovery of a broken group starts no ranks on such nodes.
    if not isinstance(policy, ReplacePolicy) or not ranks or core.lifecycle.state is not State.READY:
        return
    if not policy.allows_preemption(core.preemptions):
        why = f"{policy} allows no more preemptions"
        _log.warning("group %r: ranks %s stay on nodes that go: %s", core.name, list(ranks), why)
        return
    stays_because, again = move(core, ranks)
    if not stays_because:
        core.preemptions += 1
        _log.warning("group %r: ranks %s were moved off nodes that go", core.name, list(ranks))
    elif stays_because != core.stays_because:
        _log.warning("group %r: ranks %s stay on nodes that go: %s", core.name, list(ranks), stays_because)
    core.stays_because = stays_because
    if again:
        core.move_after = core.backend.now() + _AGAIN_AFTER_S
        core.notices.urgent = True


def move(core: Group, ranks: Sequence[int]) -> tuple[str, bool]:
    """Replace ranks that live, on nodes that stay, with their states of now; see ``px.ReplacePolicy``.

    Calls that were sent before end first. Where it cannot be done all is as it was, and the ranks are lost with their
    nodes, unless it can be done later.

    Returns:
        Why the ranks stay, "" if they were moved; and whether to try again at a later call.

    Raises:
        Errors of the constructors and ``rejoin()``; the group is broken then.
    """
    if len(ranks) == core.world_size:
        why = "all of its ranks are there, so that none could keep their state; px.save before the deadline"
        return why, False
    if not has_room_elsewhere(core.pool):
        return "no other node has room for their slots", True
    if _cannot_wait(core):
        return "calls are under way", True
    stateful = has_state(core)  # after the calls before it
    try:
        if stateful:
            take(core)
    except CheckpointError as error:
        return f"no snapshot could be taken: {_first_line(error)}", False
    try:
        replace_lost_ranks(core, ranks, "snapshot" if stateful else "none")
    except (GroupBroken, PlacementError) as error:
        # Where it is broken by that, it is recovered as any broken group.
        return _first_line(error), False
    return "", False


def _cannot_wait(core: Group) -> bool:
    """Return whether calls are under way that may need the driver to go on, or that a rank begins in any order."""
    calls = [call for call in calls_of(core) if not call.all_ended()]
    return bool(calls) and (core.card.asynchronous or any(call.streams is not None for call in calls))


def go_back(cores: Sequence[Group]) -> None:
    """Bring groups that this driver owns back to their last snapshots, in the processes that they have."""
    with contextlib.ExitStack() as held:
        for core in in_one_order(cores):
            held.enter_context(core.changing)
        for core in cores:
            if core.card.asynchronous:  # other ranks start a restore only after the calls before it
                for call in calls_of(core):
                    with contextlib.suppress(PhalanxError):  # it belongs to processes that are gone
                        call.cancel()
            while not _has_gone_back(core):
                pass


def _has_gone_back(core: Group) -> bool:
    """Reset a group to its snapshot, recovered first if it is broken and has a policy. Return False to retry.

    A loss that another group has reported may not be known to this group yet.
    """
    ensure_ready(core)
    core.check()
    found = core.snapshot
    if found is None:
        raise CheckpointError(
            f"px.restore({core.name}): there is no snapshot of the group: none was taken since it was started, "
            "restarted or resized. Call px.snapshot(group) after a step; px.load brings back what was saved"
        )
    try:
        run_on(core, handlers.restore_snapshot, None, found.number, title="px.restore").result(None)
    except WorkerDiedError:
        if core.options.on_failure is None or core.lifecycle.state is not State.BROKEN:
            raise
        return False
    return True


def has_room_elsewhere(pool: ResourcePool) -> bool:
    """Return whether the other nodes now have capacity for the blocks of the pool on draining nodes.

    The blocks of each pool behind it are checked alone, next to present reservations.
    """
    backend = pool.backend_api
    going = {node.node_id for node in backend.draining_nodes()}
    reservations = {name: holding.reservation for name, holding in pool.holdings.items()}
    nodes = zip(pool.slots, backend.nodes_of(pool.slots, reservations), strict=True)
    lost = Counter((slot.pool, slot.block) for slot, node in nodes if node in going)
    others = [node for node in backend.nodes() if node.node_id not in going]
    for name, holding in pool.holdings.items():
        sizes = [size for (of, _), size in lost.items() if of == name]
        if sizes and not check_feasible(others, sizes, holding.bundle).fits_now:
            return False
    return True


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
            restore(core, found, gone)
        elif state == "peer":
            from_peer(core, gone)

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


def _first_line(error: object) -> str:
    return str(error).partition("\n")[0]
