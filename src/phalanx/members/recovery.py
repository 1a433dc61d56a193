"""Recovery of a group when it is next called: it is broken, or nodes with ranks of it will be taken away.

Lost ranks are replaced or the group is restarted, as its policy says. Also the return to a snapshot, ``px.restore``.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Sequence

from phalanx.calls.in_flight import calls_of, make_room
from phalanx.calls.run_on import run_on
from phalanx.errors import CheckpointError, GroupBroken, PhalanxError, PlacementError, WorkerDiedError
from phalanx.group import roster
from phalanx.group.group import Group
from phalanx.group.lifecycle import State
from phalanx.group.options import ReplacePolicy, RestartPolicy
from phalanx.group.preemption_notices import look_once
from phalanx.members.processes import restart
from phalanx.members.replacement import lost_ranks, replace_lost_ranks, settle
from phalanx.members.snapshots import in_one_order, take_together
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
    if core.lifecycle.state is not State.BROKEN and not core.notices.urgent:
        return
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
    """Recover a group. Return False if the policy does not allow that once more."""
    replaces = isinstance(policy, ReplacePolicy)
    if _was_preempted(core):
        why = "since its ranks lost their nodes as was announced"
    else:
        now = core.backend.now()
        core.recoveries = policy.recent(core.recoveries, now)
        if not policy.allows(core.recoveries, now):
            what = "replacement" if replaces else "restart"
            core.lifecycle.remark = (
                f"{policy} does not allow another {what} now: {len(core.recoveries)} were made."
            )
            return False
        core.recoveries.append(now)
        why = f"after: {_first_line(core.lifecycle.cause)}"
    if replaces:
        _log.warning("group %r gets new processes for the ranks that it lost, %s", core.name, why)
        heal(core)
    else:
        _log.warning("group %r is restarted %s", core.name, why)
        restart(core)
    return True


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
    stays_because, again = _move(core, ranks)
    if not stays_because:
        _log.warning("group %r: ranks %s were moved off nodes that go", core.name, list(ranks))
    elif stays_because != core.stays_because:
        _log.warning("group %r: ranks %s stay on nodes that go: %s", core.name, list(ranks), stays_because)
    core.stays_because = stays_because
    if again:
        core.move_after = core.backend.now() + _AGAIN_AFTER_S
        core.notices.urgent = True


def _move(core: Group, ranks: Sequence[int]) -> tuple[str, bool]:
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
    if not _has_room_elsewhere(core.pool):
        return "no other node has room for their slots", True
    calls = [call for call in calls_of(core) if not call.all_ended()]
    # Calls may need the driver to go on; an asynchronous rank begins calls in any order.
    if calls and (core.card.asynchronous or any(call.streams is not None for call in calls)):
        return "calls are under way", True
    is_stateful = any(run_on(core, handlers.has_state, title="px.snapshot").result(None))  # after these calls
    try:
        if is_stateful:
            take_together([core])
    except CheckpointError as error:
        return f"no snapshot could be taken: {_first_line(error)}", False
    try:
        replace_lost_ranks(core, ranks, "snapshot" if is_stateful else "none")
    except (GroupBroken, PlacementError) as error:
        # Where it is broken by that, it is recovered as any broken group.
        return _first_line(error), False
    return "", False


def _has_room_elsewhere(pool: ResourcePool) -> bool:
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
    snapshot = core.snapshot
    if snapshot is None:
        raise CheckpointError(
            f"px.restore({core.name}): there is no snapshot of the group: none was taken since it was started, "
            "restarted or resized. Call px.snapshot(group) after a step; px.load brings back what was saved"
        )
    try:
        run_on(core, handlers.restore_snapshot, None, snapshot.number, title="px.restore").result(None)
    except WorkerDiedError:
        if core.options.on_failure is None or core.lifecycle.state is not State.BROKEN:
            raise
        return False
    return True


def _first_line(error: object) -> str:
    return str(error).partition("\n")[0]
