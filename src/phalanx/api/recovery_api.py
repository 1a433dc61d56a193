"""``px.snapshot``, ``px.restore``, ``px.replace_ranks``, ``px.preemption_notices``: states and ranks after a loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

from phalanx.api.view import GroupView
from phalanx.api.worker_group import WorkerGroup
from phalanx.errors import DeclarationError
from phalanx.group.group import Group
from phalanx.group.preemption_monitor import look_once
from phalanx.group.preemption_notices import PreemptionNotice
from phalanx.group.snapshot_placement import Snapshot
from phalanx.members.rank_replacement import lost_ranks, replace_lost_ranks
from phalanx.members.recovery import go_back
from phalanx.members.snapshots import take_together


@overload
def snapshot(group: WorkerGroup, /) -> Snapshot: ...


@overload
def snapshot(group: WorkerGroup, other: WorkerGroup, /, *groups: WorkerGroup) -> tuple[Snapshot, ...]: ...


def snapshot(group: WorkerGroup, /, *groups: WorkerGroup) -> Snapshot | tuple[Snapshot, ...]:
    """Copy the state of each rank into host memory, its own and that of another rank, on another node if there is one.

    ``px.replace_ranks`` brings replaced ranks, and the others, back to the last snapshot; ``px.restore`` brings
    back those of a group that lost none. The state is what ``px.save`` would write, ``state_dict()`` or what was
    registered, and the states of the random generators. A snapshot waits for the calls before it, and those after it
    wait for it. Tensors that have not changed since the last one are not sent again.

    Groups that work on one step are given together: the snapshot counts once all of them have theirs, so that they go
    back to one point. If it fails, the last one stays; count a step as done once its snapshot is.

    Args:
        group: a whole group that this driver owns.
        groups: more of them.

    Returns:
        Its number, holders, bytes and seconds; of several groups, a tuple.

    Raises:
        DeclarationError: one of them is none.
        CheckpointError: a worker has no state; see ``px.save``.
        GroupClosed, GroupBroken: a group takes no calls. Its policy, if it has one, does not mend it here: it would go
            back to the snapshot before.
    """
    taken = take_together(_cores_of((group, *groups), "px.snapshot"))
    return tuple(taken) if groups else taken[0]


def restore(group: WorkerGroup, /, *groups: WorkerGroup) -> None:
    """Bring all ranks of groups back to the last ``px.snapshot`` of each, in the processes that they have.

    For groups that lost no rank and yet have to go back: the step which another group failed in has drawn random
    numbers, or changed weights, here too. Gradients are dropped. A restore waits for the calls before it; those that
    asynchronous ranks are at are cancelled, as far as this driver has their futures, since they are part of what is
    undone. A broken group with ``on_failure=px.ReplacePolicy(...)`` is mended first, so that this is all that a
    step needs to be made again::

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
        DeclarationError: one of them is none.
        CheckpointError: a group has no snapshot: none was taken since it was started, restarted or resized.
        GroupBroken: a group has lost ranks, and has no policy; ``px.replace_ranks`` gives it new ones.
        GroupClosed: a group is closed.
        RemoteCallError, WorkerDiedError: a state could not be brought back.
    """
    go_back(_cores_of((group, *groups), "px.restore"))


def replace_ranks(
    group: WorkerGroup,
    ranks: int | Sequence[int] = (),
    *,
    state: Literal["snapshot", "peer", "none"] = "snapshot",
) -> tuple[int, ...]:
    """Give ranks of a group new processes; the others keep theirs, with all that lies in their memory.

    The ranks named are ended if they live; those whose processes are gone are replaced with them. Each new one is made
    by its constructor, with ``self.rejoining`` true, on its slot, or on another node if that one is gone, while the
    others run ``rejoin()``: together they form their process groups anew. Then the calls of methods registered with
    ``rerun_on_restart=True`` are made again, and the states are brought back, so that the step which failed can be
    made again.
    Where a ``px.WeightSync`` had brought weights, all ranks get the source's present ones, as a new version, before
    they are called; where the source is lost or was restarted a warning says so, and new ranks refuse methods that need
    weights until the next sync. The group is in its next epoch then: futures of calls on ranks that were replaced fail
    with ``StaleEpoch``.

    Args:
        group: a whole group that this process owns; ready, or broken.
        ranks: which to replace; none given: those that are gone, each of which is looked at.
        state: where states come from: the last ``px.snapshot``, for all ranks; a ``"peer"``, for the new ones alone, of
            a group whose ranks all have the same state; or nowhere, ``"none"``, where ranks need none.

    Returns:
        The ranks that were replaced, with those on nodes that go; none where none was to be.

    Raises:
        DeclarationError: ``group`` or ``ranks`` are not what is expected.
        GroupBroken: nobody has the state of a lost rank any more; the group is as it was.
        GroupClosed: the group is closed.
        PlacementError: a node is lost, and the others have no room.
        WorkerInitError, RemoteCallError, WorkerDiedError, CallTimeout: a constructor or a ``rejoin()`` failed; the
            group is broken, and ``restart()`` makes all ranks anew.
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
    """The notices that ranks of a group will lose their node, each given once; does not wait.

    They come from nodes that the cluster drains (before a preemption, by an autoscaler, by ``ray drain-node``), at most
    two seconds after that became known. What becomes of such ranks counts as no failure: ``px.RestartPolicy``
    brings the group back on other nodes without counting it.

    Example::

        for notice in px.preemption_notices(group):
            px.save(group, folder)
            print(notice.ranks, notice.node, notice.deadline, notice.reason)
    """
    core = group.core
    if core.backend.immediate or not core.owner:  # nobody watches for it
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
