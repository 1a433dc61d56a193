"""Recovery of a group before its next call, if it is broken or has ranks on draining nodes.

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
from phalanx.group.lifecycle import State, first_line
from phalanx.group.options import ReplacePolicy, RestartPolicy
from phalanx.group.preemption_notices import look_once
from phalanx.members.processes import restart
from phalanx.members.replacement import lost_ranks, replace_lost_ranks, settle
from phalanx.members.snapshots import in_one_order, take_together
from phalanx.topology.placement import fits_on
from phalanx.worker import handlers

_AGAIN_AFTER_S = 1.0
_log = logging.getLogger("phalanx")


def ensure_ready(core: Group) -> None:
    """Recover a broken group, or move its ranks off draining nodes, if its policy says so.

    Also refresh a view, and wait if too many calls are in flight. Called before a call is planned, and never by a
    thread that holds ``send_lock`` or the lock of a sync.
    """
    if core.is_view:
        roster.look(core)
    if len(core.recent) >= core.max_in_flight:
        make_room(core)  # first, because the group may break during the wait
    if core.lifecycle.state is not State.BROKEN and not core.notices.urgent:
        return
    policy = core.options.on_failure
    if policy is None:
        core.notices.urgent = False
        return
    with core.changing:
        if core.is_changed_here:
            return
        with core.as_it_is():  # a move or recovery makes calls itself
            if core.notices.urgent:
                _move_away(core, policy)
            while core.lifecycle.state is State.BROKEN and _has_recovered(core, policy):
                pass  # another rank may have been lost by then


def _has_recovered(core: Group, policy: RestartPolicy | ReplacePolicy) -> bool:
    """Recover a group. Return False if the policy does not allow another recovery."""
    replaces = isinstance(policy, ReplacePolicy)
    if _was_preempted(core):
        why = "since its ranks lost their nodes as was announced"
    else:
        now = core.backend.now()
        core.recoveries = policy.recent(core.recoveries, now)
        if len(core.recoveries) >= (policy.max_failures if replaces else policy.max_restarts):
            what = "replacement" if replaces else "restart"
            core.lifecycle.remark = (
                f"{policy} does not allow another {what} now: {len(core.recoveries)} were made."
            )
            return False
        core.recoveries.append(now)
        why = f"after: {first_line(core.lifecycle.cause)}"
    if replaces:
        _log.warning("group %r gets new processes for the ranks that it lost, %s", core.name, why)
        recover(core)
    else:
        _log.warning("group %r is restarted %s", core.name, why)
        restart(core)
    return True


def recover(core: Group) -> None:
    """Replace the lost ranks of a broken group, or restart the group if a replacement is impossible.

    A group may be broken without a lost rank: a call reached some ranks only, or collectives were aborted when a call
    was cancelled. Then one rank is recreated, so that all ranks form their process groups again.

    Raises:
        Errors of ``px.replace_ranks`` and ``restart()``: if a constructor fails.
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
    """Return whether the group broke because announced nodes were drained, which does not count as a failure."""
    cause, nodes = core.lifecycle.cause, core.epoch.nodes
    ranks = cause.cause_ranks if isinstance(cause, WorkerDiedError) else ()
    if not ranks or max(ranks) >= len(nodes):
        return False
    look_once(core)
    return core.notices.explains([nodes[rank] for rank in ranks])


def _move_away(core: Group, policy: RestartPolicy | ReplacePolicy) -> None:
    """Move ranks off draining nodes, if the policy replaces ranks."""
    if core.backend.now() < core.move_after:
        return
    core.notices.urgent = False
    ranks = core.notices.ranks_to_move(core.epoch.nodes)
    # The recovery of a broken group starts no ranks on draining nodes.
    if not isinstance(policy, ReplacePolicy) or not ranks or core.lifecycle.state is not State.READY:
        return
    stays_because, again = _move(core, ranks)
    if not stays_because:
        _log.warning("group %r: ranks %s were moved off draining nodes", core.name, list(ranks))
    elif stays_because != core.stays_because:
        _log.warning("group %r: ranks %s stay on draining nodes: %s", core.name, list(ranks), stays_because)
    core.stays_because = stays_because
    if again:
        core.move_after = core.backend.now() + _AGAIN_AFTER_S
        core.notices.urgent = True


def _move(core: Group, ranks: Sequence[int]) -> tuple[str, bool]:
    """Move living ranks, with their current states, off draining nodes; see ``px.ReplacePolicy``.

    Earlier calls end first. If the ranks cannot be moved, nothing changes: they are lost with their nodes, unless a
    later try succeeds.

    Returns:
        The reason why the ranks stay, "" if they were moved; and whether to try again at a later call.

    Raises:
        Errors of the constructors and ``rejoin()``: if one of them fails; the group is then broken.
    """
    if len(ranks) == core.world_size:
        why = "these are all its ranks, so none could keep their state; call px.save before the deadline"
        return why, False
    if not _has_room_elsewhere(core):
        return "no other node has capacity for their slots", True
    calls = [call for call in calls_of(core) if not call.all_ended()]
    # A stream may need the driver to continue; an asynchronous rank begins calls in any order.
    if calls and (core.handle.asynchronous or any(call.streams is not None for call in calls)):
        return "calls are in flight", True
    is_stateful = any(run_on(core, handlers.has_state, title="px.snapshot").result(None))  # after these calls
    try:
        if is_stateful:
            take_together([core])
    except CheckpointError as error:
        return f"no snapshot could be taken: {first_line(error)}", False
    try:
        replace_lost_ranks(core, ranks, "snapshot" if is_stateful else "none")
    except (GroupBroken, PlacementError) as error:
        # If this broke the group, the group is recovered like any broken group.
        return first_line(error), False
    return "", False


def _has_room_elsewhere(core: Group) -> bool:
    """Return whether the other nodes now have capacity for the blocks of the group's ranks on draining nodes.

    The blocks of each reservation are checked alone: two reservations may count the same capacity.
    """
    backend, ground = core.backend, core.pool.first(core.world_size)
    going = {node.node_id for node in backend.draining_nodes()}
    nodes = zip(ground.slots, ground.nodes_of(ground.slots), strict=True)
    lost = {(slot.pool, slot.block) for slot, node in nodes if node in going}
    others = [node.available for node in backend.nodes() if node.node_id not in going]
    extras = core.options.extras()
    for name, held in ground.holdings.items():
        sizes = [held.blocks[block] for of, block in lost if of == name]  # complete blocks move
        each = Counter(held.bundle) + Counter(extras)
        if not fits_on(others, sizes, each):
            return False
    return True


def go_back(cores: Sequence[Group]) -> None:
    """Restore groups that this driver owns to their last snapshots, in their present processes."""
    with contextlib.ExitStack() as held:
        for core in in_one_order(cores):
            held.enter_context(core.changing)
        for core in cores:
            if core.handle.asynchronous:  # synchronous ranks begin a restore only after their earlier calls
                for call in calls_of(core):
                    with contextlib.suppress(PhalanxError):  # its ranks were replaced, or died
                        call.cancel()
            while not _has_gone_back(core):
                pass


def _has_gone_back(core: Group) -> bool:
    """Restore a group to its snapshot, after a recovery if it is broken and has a policy. Return False to retry.

    A loss may become known to this group only during the restore, even if another group has reported it.
    """
    ensure_ready(core)
    core.check()
    snapshot = core.snapshot
    if snapshot is None:
        raise CheckpointError(
            f"px.restore({core.name}): there is no snapshot of the group: none was taken since it was started, "
            "restarted or resized. Call px.snapshot(group) after a step; px.load loads a saved step"
        )
    try:
        run_on(core, handlers.restore_snapshot, None, snapshot.number, title="px.restore").result(None)
    except WorkerDiedError:
        if core.options.on_failure is None or core.lifecycle.state is not State.BROKEN:
            raise
        return False
    return True
