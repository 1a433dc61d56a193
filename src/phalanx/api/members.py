"""``px.snapshot``, ``px.restore``, ``px.replace_ranks``, ``px.preemption_notices``, ``px.resize``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, overload

from phalanx.api.view import GroupView
from phalanx.api.worker_group import WorkerGroup
from phalanx.config import as_integer
from phalanx.errors import DeclarationError, PlacementError
from phalanx.group.epoch import Snapshot
from phalanx.group.group import Group
from phalanx.group.preemption_notices import PreemptionNotice, look_once
from phalanx.members.meshes import engine_ranks
from phalanx.members.recovery import ensure_ready, go_back
from phalanx.members.replacement import lost_ranks, replace_lost_ranks
from phalanx.members.resize import change_members
from phalanx.members.snapshots import take_together
from phalanx.wire.value import checked_choice, checked_number, checked_timeout


@overload
def snapshot(group: WorkerGroup, /) -> Snapshot: ...


@overload
def snapshot(group: WorkerGroup, other: WorkerGroup, /, *groups: WorkerGroup) -> tuple[Snapshot, ...]: ...


def snapshot(group: WorkerGroup, /, *groups: WorkerGroup) -> Snapshot | tuple[Snapshot, ...]:
    """Copy the state of each rank into its own host memory and into that of another rank, on another node if possible.

    ``px.replace_ranks`` resets all ranks, replaced or not, to the last snapshot; ``px.restore`` does so for a group
    that lost no rank. The copied state is the state that ``px.save`` would write (``state_dict()`` or the registered
    state) and the states of the random generators. A snapshot waits for earlier calls, and later calls wait for it.
    Tensors that have not changed since the last snapshot are not sent again.

    Pass all groups that work on the same step together. The snapshot becomes valid once every group has its copy, so
    that all groups go back to the same point. If it fails, the last snapshot stays valid. Treat a step as done only
    after its snapshot succeeded.

    Args:
        group: a complete group that this driver owns.
        groups: further groups of this kind.

    Returns:
        Number, holders, bytes and seconds of the snapshot; a tuple for several groups.

    Raises:
        DeclarationError: if an argument is not such a group, or a group is given twice.
        CheckpointError: if a worker has no state; see ``px.save``.
        GroupClosed, GroupBroken: if a group accepts no calls. Its policy does not recover it here, because this would
            restore the previous snapshot.
    """
    taken = take_together(_cores_of((group, *groups), "px.snapshot"))
    return tuple(taken) if groups else taken[0]


def restore(group: WorkerGroup, /, *groups: WorkerGroup) -> None:
    """Reset all ranks of groups to the last ``px.snapshot`` of each group, in their current processes.

    Use it for groups that lost no rank but took part in a failed step, which has consumed random numbers or changed
    weights there too. Gradients are dropped. A restore waits for the calls before it. Calls that run on asynchronous
    ranks are cancelled if this driver has their futures, since they belong to the undone step. A broken group with
    ``on_failure=px.ReplacePolicy(...)`` is recovered first, so a failed step is repeated like this::

        try:
            reward = step(policy, rollout)
            px.snapshot(policy, rollout)
        except px.PhalanxError as error:
            if not error.lost:
                raise  # a bug would fail again
            px.restore(policy, rollout)

    Args:
        group: a complete group that this driver owns.
        groups: further groups of this kind.

    Raises:
        DeclarationError: if an argument is not such a group, or a group is given twice.
        CheckpointError: if a group has no snapshot since it was started, restarted or resized.
        GroupBroken: if a group has lost ranks and has no policy; ``px.replace_ranks`` replaces the ranks.
        GroupClosed: if a group is closed.
        RemoteCallError, WorkerDiedError: if a state cannot be restored.
    """
    go_back(_cores_of((group, *groups), "px.restore"))


def replace_ranks(
    group: WorkerGroup,
    ranks: int | Sequence[int] = (),
    *,
    state: Literal["snapshot", "peer", "none"] = "snapshot",
) -> tuple[int, ...]:
    """Replace the processes of ranks of a group; the other ranks keep their processes.

    With ``state="snapshot"`` all ranks go back to the last snapshot, and a new snapshot is taken; otherwise the other
    ranks keep their state, and the group has no snapshot any more.

    The given ranks are ended if they are alive; ranks whose processes died are replaced too. Each new rank runs its
    constructor, with ``self.rejoining`` true, on its slot (on another node if its node was lost), while the other
    ranks run ``rejoin()``, each after its present call, for which the replacement waits: together they create their
    process groups again. Then the calls of methods registered with ``rerun_on_restart=True`` are repeated, and the
    states are restored, so that the failed step can be repeated. If a ``px.WeightSync`` had synced weights to the
    group, all ranks get the source's current weights, as a new version, before they are called. If the source was lost
    or restarted, a warning is logged, and new ranks refuse methods that need weights until the next sync. The group
    enters its next epoch: futures of calls on replaced ranks fail with ``StaleEpoch``.

    Args:
        group: a complete group that this process owns, ready or broken.
        ranks: ranks to replace; default: all ranks that are found dead.
        state: source of the states: ``"snapshot"``: the last ``px.snapshot``, for all ranks; ``"peer"``: another rank,
            for the new ranks only, if all ranks have the same state; ``"none"``: the ranks need no state.

    Returns:
        The ranks that were replaced. If a rank is lost or given, ranks on draining nodes are replaced too; else the
        result is empty.

    Raises:
        DeclarationError: if ``group``, ``ranks`` or ``state`` is invalid.
        GroupBroken: if ``state="snapshot"`` and there is no snapshot, or if no living rank has the state of a lost
            rank; the group is unchanged.
        GroupClosed: if the group is closed.
        PlacementError: if a node was lost and the other nodes have no capacity.
        WorkerInitError, RemoteCallError, WorkerDiedError, CallTimeout: if a constructor or a ``rejoin()`` fails; the
            group is broken, and ``restart()`` recreates all ranks.
    """
    core = _core_of(group, "px.replace_ranks")
    chosen_ranks = group._selection.chosen_ranks  # pyright: ignore[reportPrivateUsage]
    is_none = as_integer(ranks) is None and isinstance(ranks, Collection) and not len(ranks)
    named = () if is_none else chosen_ranks("replace_ranks", ranks, DeclarationError)
    checked_choice("px.replace_ranks: state", state, ("snapshot", "peer", "none"))
    with core.changing:
        if core.closed:
            core.lifecycle.check_callable()
        gone = sorted({*named, *lost_ranks(core)})
        if not gone:
            return ()
        return replace_lost_ranks(core, gone, state)


def preemption_notices(group: GroupView) -> list[PreemptionNotice]:
    """Return the new notices that ranks of the group will lose their node. Each is returned once. Does not wait.

    A notice appears at most 2 s after the cluster begins to drain a node (before a preemption, by an autoscaler, by
    ``ray drain-node``). The loss of such ranks does not count as a failure: ``px.RestartPolicy`` restarts the group on
    other nodes without counting it.

    Example::

        for notice in px.preemption_notices(group):
            px.save(group, folder)
            print(notice.ranks, notice.node, notice.deadline, notice.reason)
    """
    core = group.core
    if core.backend.immediate or not core.owner:  # the background thread does not watch these groups
        look_once(core)
    return core.notices.take()


def _cores_of(groups: Sequence[object], verb: str) -> list[Group]:
    cores = [_core_of(group, verb) for group in groups]
    if len(set(map(id, cores))) < len(cores):
        raise DeclarationError(f"{verb}({', '.join(core.name for core in cores)}): a group is given twice")
    return cores


def _core_of(group: object, verb: str) -> Group:
    if not isinstance(group, WorkerGroup):
        raise DeclarationError(
            f"{verb}({group!r}): expected a px.WorkerGroup, not a view, in the process that made it"
        )
    return group.core


def resize(group: WorkerGroup, n: int, *, timeout: float | None = None) -> None:
    """Resize a group to ``n`` ranks, on the first ``n`` slots of its pool (to ``n`` engines, if it has a mesh with tp).

    If the class has ``independent = True`` (each rank works alone: engines, rewards, data), the other ranks continue to
    work. New ranks start, get the calls of methods with ``rerun_on_restart=True`` and the weights of each
    ``px.WeightSync`` to the group (by a sync of all ranks), and only then calls of users. Ranks leave from the highest
    number down: they get no more calls, finish their calls, run their own ``close()``, and end. Remaining ranks keep
    their numbers; their ``world_size`` changes after the calls that they have. Views of the complete group,
    ``group.any`` and ``px.engines.sticky`` follow the change; results of calls on ranks that left remain valid. If the
    group has a mesh, given or registered by its workers, the ranks of a dp coordinate meet in collectives, so they join
    and leave together; the dp axis of a given mesh changes.

    A group of any other class, whose ranks work together, cannot be resized: save it, close it, and load the saved
    step, resharded, into a new group of another size.

    Args:
        group: a group that this process created.
        n: number of ranks, or of dp coordinates if independent ranks have a mesh; from 1 to the number that the slots
            of the pool allow (``pool.grow()`` reserves more).
        timeout: seconds for leaving ranks to finish; None: no limit.

    Raises:
        DeclarationError: if ranks work together; if the group is detached or of another process; if a mesh cannot have
            that size, for example because its slowest axis is not dp.
        PlacementError: if the pool has fewer slots, or the processes cannot start; the group is unchanged.
        CallTimeout: if leaving ranks still run calls; they get no more, and the next ``px.resize`` ends them.
        Errors of the constructors of new ranks: the group is unchanged.
    """
    core = _core_of(group, "px.resize")
    if core.handle.detached:
        raise DeclarationError(f"px.resize({group.name}, {n!r}): a detached group cannot be resized")
    if core.handle.independent:
        ensure_ready(core)  # its ranks may be asked for their coordinates
    block = engine_ranks(core) if core.handle.independent else 1
    size = _checked_size(group.name, n, group.pool.world_size, block)
    if not core.handle.independent:
        raise DeclarationError(
            f"px.resize({group.name}, {n!r}): its ranks work together, so that they cannot come and go one by one. "
            "Save it, close it, and load the step into a new group: px.save(group, folder); group.close(); group = "
            "px.WorkerGroup(pool[:n], ...); px.load(group, folder). Or say `independent = True` in the class, if its "
            "ranks never meet in a collective and any of them can do any call"
        )
    change_members(core, size, checked_timeout(timeout, "px.resize"))


def _checked_size(group: str, wanted: object, slots: int, block: int) -> int:
    """Return the number of ranks in ``wanted`` blocks of ``block`` ranks, for a pool of ``slots`` slots.

    Raises:
        DeclarationError: if ``wanted`` is not a whole number from 1.
        PlacementError: if the pool has fewer slots.
    """
    what = "ranks" if block == 1 else f"engines, of {block} ranks each"
    advice = f"expected a number of {what}, 1 or more; close() ends a group"
    size = checked_number(f"px.resize({group}): size", wanted, 1, advice) * block
    if size > slots:
        each = "" if block == 1 else f", and {wanted} engines of {block} ranks take {size}"
        raise PlacementError(
            f"px.resize({group}, {wanted}): its pool has {slots} slots{each}; pool.grow({size - slots}) reserves more, "
            "or give a smaller number"
        )
    return size
