"""``px.snapshot``, ``px.restore``, ``px.replace_ranks``, ``px.preemption_notices``, ``px.resize``: states and ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, overload

from phalanx.api.view import GroupView
from phalanx.api.worker_group import WorkerGroup
from phalanx.calls.timeouts import checked
from phalanx.errors import DeclarationError, DispatchError
from phalanx.group.group import Group
from phalanx.group.preemption_notices import PreemptionNotice, look_once
from phalanx.group.resize_plan import block_of, checked_size, fitted
from phalanx.group.snapshot_placement import Snapshot
from phalanx.members.meshes import mesh_of
from phalanx.members.recovery import go_back
from phalanx.members.replacement import lost_ranks, replace_lost_ranks
from phalanx.members.resize import change_members, restart_with
from phalanx.members.snapshots import take_together
from phalanx.topology.mesh import Mesh


@overload
def snapshot(group: WorkerGroup, /) -> Snapshot: ...


@overload
def snapshot(group: WorkerGroup, other: WorkerGroup, /, *groups: WorkerGroup) -> tuple[Snapshot, ...]: ...


def snapshot(group: WorkerGroup, /, *groups: WorkerGroup) -> Snapshot | tuple[Snapshot, ...]:
    """Copy the state of each rank into its own host memory and into that of another rank, on another node if possible.

    ``px.replace_ranks`` resets all ranks, replaced or not, to the last snapshot; ``px.restore`` does so for a group
    that lost no rank. The state is the state that ``px.save`` would write (``state_dict()`` or the registered state)
    and the states of the random generators. A snapshot waits for earlier calls, and later calls wait for it. Tensors
    that have not changed since the last snapshot are not sent again.

    Pass all groups that work on the same step together: the snapshot counts once every group has its copy, so that all
    of them go back to the same point. If it fails, the last snapshot stays; count a step as done once its snapshot is.

    Args:
        group: a whole group that this driver owns.
        groups: more of them.

    Returns:
        Its number, holders, bytes and seconds; of several groups, a tuple.

    Raises:
        DeclarationError: an argument is no such group.
        CheckpointError: a worker has no state; see ``px.save``.
        GroupClosed, GroupBroken: a group takes no calls. Its policy, if any, does not recover it here, since it would
            go back to the previous snapshot.
    """
    taken = take_together(_cores_of((group, *groups), "px.snapshot"))
    return tuple(taken) if groups else taken[0]


def restore(group: WorkerGroup, /, *groups: WorkerGroup) -> None:
    """Reset all ranks of groups to the last ``px.snapshot`` of each group, in their present processes.

    For groups that lost no rank and yet have to go back: the step in which another group failed has drawn random
    numbers, or changed weights, here too. Gradients are dropped. A restore waits for the calls before it. Calls that
    run on asynchronous ranks are cancelled if this driver has their futures, since they are part of the undone step. A
    broken group with ``on_failure=px.ReplacePolicy(...)`` is recovered first, so that this is enough to repeat a step::

        try:
            reward = step(policy, rollout)
            px.snapshot(policy, rollout)
        except px.PhalanxError as error:
            if not error.lost:
                raise  # a bug would come back each time
            px.restore(policy, rollout)

    Args:
        group: a whole group that this driver owns.
        groups: more of them.

    Raises:
        DeclarationError: an argument is no such group.
        CheckpointError: a group has no snapshot: none was taken since it was started, restarted or resized.
        GroupBroken: a group has lost ranks, and has no policy; ``px.replace_ranks`` gives it new ones.
        GroupClosed: a group is closed.
        RemoteCallError, WorkerDiedError: a state could not be restored.
    """
    go_back(_cores_of((group, *groups), "px.restore"))


def replace_ranks(
    group: WorkerGroup,
    ranks: int | Sequence[int] = (),
    *,
    state: Literal["snapshot", "peer", "none"] = "snapshot",
) -> tuple[int, ...]:
    """Give ranks of a group new processes; the other ranks keep their processes.

    With ``state="snapshot"`` all ranks go back to the last snapshot; otherwise the others keep their state.

    The named ranks are ended if they live; ranks whose processes died are replaced too. Each new rank is made by its
    constructor, with ``self.rejoining`` true, on its slot, or on another node if its node was lost, while the other
    ranks run ``rejoin()``: together they create their process groups again. Then the calls of methods registered with
    ``rerun_on_restart=True`` are repeated, and the states are restored, so that the failed step can be repeated.
    If a ``px.WeightSync`` had synced weights to the group, all ranks get the source's present weights, as a new
    version, before they are called. If the source was lost or restarted, a warning says so, and new ranks refuse
    methods that need weights until the next sync. The group is in its next epoch then: futures of calls on replaced
    ranks fail with ``StaleEpoch``.

    Args:
        group: a whole group that this process owns; ready, or broken.
        ranks: the ranks to replace; default every rank that an inspection finds dead.
        state: the source of states: ``"snapshot"``, the last ``px.snapshot``, for all ranks; ``"peer"``, for the new
            ranks alone, of a group whose ranks all have the same state; ``"none"`` if ranks need no state.

    Returns:
        The ranks that were replaced, ranks on draining nodes included; empty if there was nothing to replace.

    Raises:
        DeclarationError: ``group`` or ``ranks`` are not as expected.
        CheckpointError: the states are those of a snapshot, and there is none.
        GroupBroken: no rank has the state of a lost rank any more; the group is as it was.
        GroupClosed: the group is closed.
        PlacementError: a node is lost, and the others have no capacity.
        WorkerInitError, RemoteCallError, WorkerDiedError, CallTimeout: a constructor or a ``rejoin()`` failed; the
            group is broken, and ``restart()`` recreates all ranks.
    """
    core = _core_of(group, "px.replace_ranks")
    named = _checked(core, ranks)
    if state not in ("snapshot", "peer", "none"):
        raise DeclarationError(f"px.replace_ranks(state={state!r}): expected 'snapshot', 'peer' or 'none'")
    with core.changing:
        if core.closed:
            core.lifecycle.check_callable()
        gone = sorted({*named, *lost_ranks(core)})
        if not gone:
            return ()
        return replace_lost_ranks(core, gone, state)


def preemption_notices(group: GroupView) -> list[PreemptionNotice]:
    """Return the notices that ranks of the group will lose their node, each notice once; does not wait.

    They come from nodes that the cluster drains (before a preemption, by an autoscaler, by ``ray drain-node``), at most
    two seconds after that became known. The loss of such ranks counts as no failure: ``px.RestartPolicy`` restarts the
    group on other nodes without counting it.

    Example::

        for notice in px.preemption_notices(group):
            px.save(group, folder)
            print(notice.ranks, notice.node, notice.deadline, notice.reason)
    """
    core = group.core
    if core.backend.immediate or not core.owner:  # the preemption monitor does not watch these
        look_once(core)
    return core.notices.take()


def _checked(core: Group, ranks: int | Sequence[int]) -> list[int]:
    given = [ranks] if isinstance(ranks, int) and not isinstance(ranks, bool) else ranks
    try:
        named = sorted(set(given))  # type: ignore[arg-type]
        fits = all(type(rank) is int and 0 <= rank < core.world_size for rank in named)
    except TypeError:
        fits, named = False, []
    if not fits:
        raise DeclarationError(
            f"px.replace_ranks({core.name}, {ranks!r}): expected ranks from 0 to {core.world_size - 1}"
        )
    return named


def _cores_of(groups: Sequence[object], verb: str) -> list[Group]:
    cores = [_core_of(group, verb) for group in groups]
    if len(set(map(id, cores))) < len(cores):
        raise DeclarationError(f"{verb}({', '.join(core.name for core in cores)}): a group is given twice")
    return cores


def _core_of(group: object, verb: str) -> Group:
    if not isinstance(group, WorkerGroup):
        raise DeclarationError(f"{verb}({group!r}): expected a px.WorkerGroup, in the process that made it")
    return group.core


def resize(
    group: WorkerGroup, n: int, *, via: str | Path | None = None, timeout: float | None = None
) -> None:
    """Resize a group to ``n`` ranks, on the first ``n`` slots of its pool; of a mesh with tp, to ``n`` engines.

    If the class has ``independent = True``, so that each rank works alone (engines, rewards, data), the other ranks
    continue to work. New ranks start, get the calls of methods with ``rerun_on_restart=True`` and the weights of each
    ``px.WeightSync`` to the group (by a sync, which all ranks take part in), and only then calls of users. Ranks leave
    from the highest down: they get no more calls, finish the calls that they have, run their own ``close()``, and end.
    No rank that stays gets another number; its ``world_size`` follows, after the calls that it has. Views of the whole
    group, ``group.any`` and ``px.engines.sticky`` follow; results of calls on ranks that left stay. If the group has a
    mesh, given or registered by its workers, the ranks of a dp coordinate meet in collectives, and come and go
    together; of a mesh that was given, dp follows.

    Of any other class, whose ranks work together, ``via`` names a folder: the group is saved there by ``px.save``,
    restarted with ``n`` ranks, and loaded, resharded, by ``px.load``. The saved step stays there.

    Args:
        group: made by this process.
        n: number of ranks, or of dp coordinates if independent ranks come and go together; from 1 to the number that
            the slots of the pool allow (``pool.grow()`` reserves more).
        via: a folder, or a URL as ``px.save`` takes it, for a class that is not independent.
        timeout: seconds for the leaving ranks to finish; None: no limit.

    Raises:
        DeclarationError: ranks that work together and no ``via``; a group of another process, or a detached group; a
            mesh that cannot be of that size, such as a mesh whose slowest axis is not dp.
        PlacementError: the pool has fewer slots, or the processes cannot be had; the group is as it was.
        CallTimeout: ranks that leave are still at calls; they get no more, and the next ``px.resize`` ends them.
        Errors of the constructors of new ranks: the group is as it was.
        Errors of ``px.save``, ``restart()`` and ``px.load``, with ``via``.
    """
    if not isinstance(group, WorkerGroup):
        raise DeclarationError(
            f"px.resize({group!r}, {n!r}): expected a px.WorkerGroup, in the process that made it; a view cannot be "
            "resized"
        )
    core = group.core
    if core.card.detached:
        raise DeclarationError(
            f"px.resize({group.name}, {n!r}): a detached group has the size it was made with"
        )
    block = engine_ranks(core) if core.card.independent else 1
    size = checked_size(group.name, n, group.pool.world_size, block)
    seconds = checked(timeout, "px.resize")
    if not core.card.independent:
        _start_again(group, n, via)
    elif via is None:
        change_members(core, size, seconds)
    else:
        raise DeclarationError(
            f"px.resize({group.name}, {n}, via={str(via)!r}): its ranks are independent and keep what they have; "
            "leave via= out"
        )


def _start_again(group: WorkerGroup, n: int, via: str | Path | None) -> None:
    """Have ranks that work together be of another number, by way of a folder."""
    core = group.core
    if via is None:
        raise DeclarationError(
            f"px.resize({group.name}, {n}): its ranks work together, so that they cannot come and go one by one. Give "
            "via=folder, through which the group is saved, restarted and loaded; or say `independent = True` in the "
            "class, if its ranks never meet in a collective and any of them can do any call"
        )
    for mesh in core.card.meshes.values():
        fitted(mesh, n)  # refused before anything is saved, where it cannot be of that size
    if n != core.world_size:
        folder = (
            f"{os.fspath(via).rstrip('/')}/resized-{core.epoch.number}"  # no step of the user's is replaced
        )
        from phalanx.checkpoint.save_load import load, save  # torch: loaded only where a state moves

        save(group, folder)
        restart_with(core, n)
        load(group, folder)


def engine_ranks(core: Group) -> int:
    """Return the number of ranks per engine of a group of independent ranks, those of a dp coordinate.

    Raises:
        DeclarationError: ranks of an engine are not in a row.
    """
    specs = [spec for methods in core.card.methods.values() for spec in methods.values()]
    names = {*core.card.meshes, *(spec.mode.mesh for spec in specs if spec.mode.mesh is not None)}
    meshes: dict[str, Mesh] = {}
    for name in sorted(names):
        with contextlib.suppress(DispatchError):  # no rank has it: methods with it cannot be called
            meshes[name] = mesh_of(core, name)
    return block_of(core.name, meshes)
