"""``px.resize``: a group gets more ranks, or fewer."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from phalanx.api.worker_group import WorkerGroup
from phalanx.calls.timeouts import checked
from phalanx.declare.dispatch_modes import MeshMode
from phalanx.errors import DeclarationError, DispatchError
from phalanx.group.group import Group
from phalanx.group.resize_plan import Change, block_of, fitted, plan_change
from phalanx.members.meshes import mesh_of
from phalanx.members.resize import change_members, restart_with
from phalanx.topology.mesh import Mesh


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
    change = plan_change(group.name, core.world_size, n, group.pool.world_size, block)
    seconds = checked(timeout, "px.resize")
    if not core.card.independent:
        _start_again(group, n, change, via)
    elif via is None:
        change_members(core, change, seconds)
    else:
        raise DeclarationError(
            f"px.resize({group.name}, {n}, via={str(via)!r}): its ranks are independent and keep what they have; "
            "leave via= out"
        )


def _start_again(group: WorkerGroup, n: int, change: Change, via: str | Path | None) -> None:
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
    if change.joining or change.leaving:
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
    names = {*core.card.meshes, *(spec.mode.mesh for spec in specs if isinstance(spec.mode, MeshMode))}
    meshes: dict[str, Mesh] = {}
    for name in sorted(names):
        with contextlib.suppress(DispatchError):  # no rank has it: methods with it cannot be called
            meshes[name] = mesh_of(core, name)
    return block_of(core.name, meshes)
