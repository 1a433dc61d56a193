"""``px.snapshot`` and ``px.replace``: ranks get new processes while the others keep theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from phalanx.errors import DeclarationError
from phalanx.runtime.api.group import WorkerGroup
from phalanx.runtime.groups.core import GroupCore
from phalanx.runtime.saving.replacing import lost_ranks, replace_ranks
from phalanx.runtime.saving.snapshots import take
from phalanx.saving.copies import Snapshot

__all__ = ["replace", "snapshot"]


def snapshot(group: WorkerGroup) -> Snapshot:
    """Copy the state of each rank into host memory, its own and that of another rank, on another node if there is one.

    ``px.replace`` brings replaced ranks, and the others, back to the last snapshot. The state is what ``px.save`` would
    write, ``state_dict()`` or what was registered, and the states of the random generators. A snapshot waits for the
    calls before it, and those after it wait for it. Tensors that have not changed since the last one are not sent
    again.

    Args:
        group: a whole group that this driver owns.

    Returns:
        Its number, holders, bytes and seconds.

    Raises:
        DeclarationError: ``group`` is none.
        SaveError: a worker has no state; see ``px.save``.
        GroupClosed, GroupBroken: the group takes no calls.
    """
    return take(_core_of(group, "px.snapshot"))


def replace(
    group: WorkerGroup,
    ranks: int | Sequence[int] = (),
    *,
    state: Literal["snapshot", "peer", "none"] = "snapshot",
) -> tuple[int, ...]:
    """Give ranks of a group new processes; the others keep theirs, with all that lies in their memory.

    The ranks named are ended if they live; those whose processes are gone are replaced with them. Each new one is made
    by its constructor, with ``self.rejoining`` true, on its slot, or on another node if that one is gone, while the
    others run ``rejoin()``: together they form their process groups anew. Then the calls of methods registered with
    ``replay=True`` are made again, and the states are brought back, so that the step which failed can be made again.
    The group is in its next epoch then: futures of calls on ranks that were replaced fail with ``StaleEpoch``.

    Args:
        group: a whole group that this process owns; ready, or broken.
        ranks: which to replace; none given: those that are gone.
        state: where states come from: the last ``px.snapshot``, for all ranks; a ``"peer"``, for the new ones alone, of
            a group whose ranks all have the same state; or nowhere, ``"none"``, where ranks need none.

    Returns:
        The ranks that were replaced; none where none was to be.

    Raises:
        DeclarationError: ``group`` or ``ranks`` are not what is expected.
        GroupBroken: nobody has the state of a lost rank any more; the group is as it was.
        GroupClosed: the group is closed.
        PlacementError: a node is lost, and the others have no room.
        WorkerInitError, RemoteCallError, WorkerDiedError, CallTimeout: a constructor or a ``rejoin()`` failed; the
            group is broken, and ``restart()`` makes all ranks anew.
    """
    core = _core_of(group, "px.replace")
    named = _checked(core, ranks)
    if state not in ("snapshot", "peer", "none"):
        raise DeclarationError(f"px.replace(state={state!r}): expected 'snapshot', 'peer' or 'none'")
    with core.restarting:
        if core.closed:
            core.lifecycle.check_callable()
        gone = sorted({*named, *lost_ranks(core)})
        if not gone:
            return ()
        replace_ranks(core, gone, state)
        return tuple(gone)


def _checked(core: GroupCore, ranks: int | Sequence[int]) -> list[int]:
    given = [ranks] if isinstance(ranks, int) and not isinstance(ranks, bool) else ranks
    try:
        named = sorted(set(given))  # type: ignore[arg-type]
        fits = all(type(rank) is int and 0 <= rank < core.world_size for rank in named)
    except TypeError:
        fits, named = False, []
    if not fits:
        raise DeclarationError(
            f"px.replace({core.name}, {ranks!r}): expected ranks from 0 to {core.world_size - 1}"
        )
    return named


def _core_of(group: object, verb: str) -> GroupCore:
    if not isinstance(group, WorkerGroup):
        raise DeclarationError(f"{verb}({group!r}): expected a px.WorkerGroup, in the process that made it")
    return group.core
