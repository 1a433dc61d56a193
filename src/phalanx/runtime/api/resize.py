"""``px.resize``: a group gets more ranks, or fewer."""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.errors import DeclarationError, InternalError
from phalanx.runtime.api.group import WorkerGroup
from phalanx.runtime.calls.seconds import checked
from phalanx.runtime.groups.core import GroupCore
from phalanx.runtime.life.roster import plan_change
from phalanx.runtime.saving.verbs import load, save


def resize(
    group: WorkerGroup, n: int, *, via: str | Path | None = None, timeout: float | None = None
) -> None:
    """Let a group have ``n`` ranks, on the first ``n`` slots of its pool.

    Of a class with ``independent = True``, whose ranks work each by itself (engines, rewards, data), the others work
    on meanwhile. Ranks that join start, get the calls of methods with ``replay=True`` and the weights of each
    ``px.WeightSync`` to the group (by a sync, which all ranks take part in), and only then calls of users. Those that
    leave, the highest first, get no more calls, finish what they have, run their own ``close()``, and end. No rank that
    stays gets another number; its ``world_size`` follows, after the calls that it has. Views of the whole group,
    ``group.any`` and ``px.sticky`` follow; results of calls on ranks that left stay.

    Of any other class, whose ranks work together, ``via`` names a folder: the group is saved there by ``px.save``,
    restarted with ``n`` ranks, and loaded, resharded, by ``px.load``. What was saved stays there.

    Args:
        group: made by this process.
        n: 1 or more; at most the slots of its pool: ``pool.grow()`` reserves more.
        via: a folder, or a URL as ``px.save`` takes it, for a class that is not independent.
        timeout: seconds for the ranks that leave to finish; None: as long as it takes.

    Raises:
        DeclarationError: ranks that work together and no ``via``; a group that has a mesh, or is not this process's.
        PlacementError: the pool has fewer slots, or the processes cannot be had; the group is as it was.
        CallTimeout: ranks that leave are still at calls; they get no more, and the next ``px.resize`` ends them.
        As the constructors of ranks that join: the group is as it was.
        As ``px.save``, ``restart()`` and ``px.load``, with ``via``.
    """
    if not isinstance(group, WorkerGroup):
        raise DeclarationError(
            f"px.resize({group!r}, {n!r}): expected a px.WorkerGroup, in the process that made it; a view cannot be "
            "resized"
        )
    change = plan_change(group.name, group.core.world_size, n, group.pool.world_size)
    core = group.core
    owned = core.owned
    if owned is None:
        raise InternalError(f"group {group.name!r} cannot be resized")
    _check_free(core, n)
    seconds = checked(timeout, "px.resize")
    if core.card.independent:
        if via is not None:
            raise DeclarationError(
                f"px.resize({group.name}, {n}, via={str(via)!r}): its ranks are independent and keep what they have; "
                "leave via= out"
            )
        owned.resize(change, seconds)
        return
    if via is None:
        raise DeclarationError(
            f"px.resize({group.name}, {n}): its ranks work together, so that they cannot come and go one by one. Give "
            "via=folder, through which the group is saved, restarted and loaded; or say `independent = True` in the "
            "class, if its ranks never meet in a collective and any of them can do any call"
        )
    if change.joining or change.leaving:
        folder = (
            f"{os.fspath(via).rstrip('/')}/resized-{core.epoch.number}"  # no step of the user's is replaced
        )
        save(group, folder)
        owned.restart(n)
        load(group, folder)


def _check_free(core: GroupCore, n: int) -> None:
    """See to it that nothing says how many ranks a group has.

    Raises:
        DeclarationError: it is detached, or has a mesh.
    """
    if core.card.detached:
        raise DeclarationError(f"px.resize({core.name}, {n}): a detached group has the size it was made with")
    if core.card.meshes:
        raise DeclarationError(
            f"px.resize({core.name}, {n}): the group was made with a mesh of {core.world_size} ranks; make it without "
            "mesh=, or make another group"
        )
