"""The states of ranks: copied into the memory of other ranks, and restored from there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from phalanx.backends.backend_types import NotReady
from phalanx.calls.run_on import run_on
from phalanx.errors import CallTimeout, GroupBroken
from phalanx.group.epoch import Epoch
from phalanx.group.group import Group
from phalanx.group.snapshot_placement import Snapshot, holders, lost_copies
from phalanx.worker import handlers
from phalanx.worker.handlers import RestoreRequest, SnapshotReply, SnapshotRequest


def take(core: Group) -> Snapshot:
    """Take a snapshot of a group that this driver owns."""
    return take_together([core])[0]


def has_state(core: Group) -> bool:
    """Return whether any rank has a state, as the ranks themselves say, once the calls before have ended."""
    return any(run_on(core, handlers.has_state, title="px.snapshot").result(None))


def take_together(cores: Sequence[Group]) -> list[Snapshot]:
    """Take snapshots of groups that this driver owns; they count only if all of them succeed.

    A group that is broken, or breaks during the snapshot, is not recovered, since it would go back to the previous
    snapshot.

    Raises:
        GroupBroken: a group is broken.
    """
    with contextlib.ExitStack() as held:  # no two snapshots at once, and none during a change of members
        for core in in_one_order(cores):
            held.enter_context(core.as_it_is())
        for core in cores:
            core.lifecycle.check_callable()
        epochs = [core.epoch for core in cores]
        taken = [_taken(core, epoch) for core, epoch in zip(cores, epochs, strict=True)]
        for core, epoch, found in zip(cores, epochs, taken, strict=True):
            core.snapshot, core.snapshot_epoch = found, epoch.number
            core.spare = True  # ranks that live are worth something now
        return taken


def in_one_order(cores: Sequence[Group]) -> list[Group]:
    """Sort groups in the order in which they are locked, to prevent deadlocks."""
    return sorted(cores, key=lambda one: one.card.number)


def _taken(core: Group, epoch: Epoch) -> Snapshot:
    began = time.monotonic()
    last = core.snapshot
    number, whole = (1, 0) if last is None else (last.number + 1, last.number)
    order = SnapshotRequest(number, whole, core.snapshot_epoch == epoch.number)
    ranks = range(epoch.size)
    held_by = holders(epoch.nodes)
    taken: list[SnapshotReply] = run_on(core, handlers.take_snapshot, order, title="px.snapshot").result(None)
    if epoch.size > 1:
        wards = {
            holder: {rank: taken[rank].copy for rank in ranks if held_by[rank] == holder} for holder in ranks
        }
        kept = [wards[rank] for rank in ranks]
        run_on(core, handlers.hold_copies, number, whole, each=kept, title="px.snapshot").result(None)
    return Snapshot(
        number,
        held_by,
        sum(one.nbytes for one in taken),
        sum(one.sent_bytes for one in taken) if epoch.size > 1 else 0,
        time.monotonic() - began,
    )


def check_held(core: Group, gone: Collection[int]) -> Snapshot:
    """The snapshot that a group can go back to without some of its ranks.

    Raises:
        GroupBroken: there is none, or the copies of some states were lost with their holders.
    """
    found = core.snapshot
    if found is None:
        raise GroupBroken(
            f"px.replace_ranks({core.name}): there is no snapshot of the group, so that the state of "
            f"ranks {sorted(gone)} "
            "is lost. Call px.snapshot(group) after a step; or say state='peer' where all ranks have the same state, "
            "state='none' where they need none; or restart() and load what was saved",
            group=core.name,
            cause=core.lifecycle.cause,
        )
    lost = lost_copies(found.holders, gone)
    if lost:
        told = ", ".join(f"of rank {rank} (held by rank {found.holders[rank]})" for rank in lost)
        raise GroupBroken(
            f"px.replace_ranks({core.name}): snapshot {found.number} cannot be restored: the only other copy of the "
            f"state {told} is lost too. restart() makes all ranks anew; px.load brings back what was saved",
            group=core.name,
            cause=core.lifecycle.cause,
        )
    return found


def restore(core: Group, found: Snapshot, new: Collection[int], seconds: float) -> None:
    """Restore all ranks to a snapshot: ``new`` ranks from the copies of their holders."""
    wanted = {rank: found.holders[rank] for rank in new}
    given = {
        rank: _answer(
            core, "px.replace_ranks", holder, handlers.give_copy, rank, found.number, seconds=seconds
        )
        for rank, holder in wanted.items()
    }
    orders: Mapping[int, RestoreRequest] = {
        rank: RestoreRequest(found.number, given.get(rank)) for rank in range(core.world_size)
    }
    each = [orders[rank] for rank in range(core.world_size)]
    call = run_on(core, handlers.restore_snapshot, each=each, title="px.replace_ranks", checked=False)
    for answer in call.answers(seconds).values():
        _checked(core, answer, seconds)


def _answer(
    core: Group, what: str, rank: int, function: Callable[..., Any], *args: Any, seconds: float
) -> Any:
    (answer,) = (
        run_on(core, function, *args, ranks=[rank], title=what, checked=False).answers(seconds).values()
    )
    return _checked(core, answer, seconds)


def _checked(core: Group, answer: Any, seconds: float) -> Any:
    """Return the answer of a rank.

    Raises:
        CallTimeout: it gave none within so many seconds.
        PhalanxError: it failed, or was lost.
    """
    if isinstance(answer, NotReady):
        raise CallTimeout(
            f"group {core.name!r}: {answer}, for {seconds:g} s, while states were brought back after a replacement; "
            "restart() makes all ranks anew",
            group=core.name,
            method="px.replace_ranks",
            timeout=seconds,
        )
    if isinstance(answer, BaseException):
        raise answer
    return answer


def from_peer(core: Group, new: Collection[int], seconds: float) -> None:
    """Give ranks that are ``new`` the state of a rank that is not."""
    peer = next(rank for rank in range(core.world_size) if rank not in new)
    copy = _answer(core, "px.replace_ranks", peer, handlers.copy_of_now, seconds=seconds)
    for rank in new:
        _answer(
            core,
            "px.replace_ranks",
            rank,
            handlers.restore_snapshot,
            RestoreRequest(0, copy, keep_rng=True),
            seconds=seconds,
        )
