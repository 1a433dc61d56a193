"""The states of ranks: copied into the memory of other ranks, and restored from there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from phalanx.calls.run_on import run_on
from phalanx.errors import GroupBroken
from phalanx.group.epoch import Epoch
from phalanx.group.group import Group
from phalanx.group.snapshot_placement import Snapshot, holders, lost_copies
from phalanx.wire.messages import BackendRef
from phalanx.worker import handlers
from phalanx.worker.handlers import SnapshotReply

_RESTORED_WITHIN_S = 300.0


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
    number, last = (1, 0) if core.snapshot is None else (core.snapshot.number + 1, core.snapshot.number)
    again, alone = core.snapshot_epoch == epoch.number, epoch.size == 1
    held_by, title = holders(epoch.nodes), "px.snapshot"
    taken: list[SnapshotReply] = run_on(
        core, handlers.take_snapshot, number, last, again, title=title
    ).result(None)
    if not alone:
        kept: list[dict[int, BackendRef]] = [{} for _ in taken]
        for rank, reply in enumerate(taken):
            kept[held_by[rank]][rank] = reply.copy
        run_on(core, handlers.hold_copies, number, last, each=kept, title=title).result(None)
    nbytes = sum(reply.nbytes for reply in taken)
    sent = 0 if alone else sum(reply.sent_bytes for reply in taken)
    return Snapshot(number, held_by, nbytes, sent, time.monotonic() - began)


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


def restore(core: Group, found: Snapshot, new: Collection[int]) -> None:
    """Restore all ranks to a snapshot: ``new`` ranks from the copies of their holders."""
    copies = {
        rank: _call(core, [found.holders[rank]], handlers.give_copy, rank, found.number) for rank in new
    }
    everyone = range(core.world_size)
    each = [copies.get(rank) for rank in everyone]
    _call(core, everyone, handlers.restore_snapshot, found.number, each=each)


def from_peer(core: Group, new: Collection[int]) -> None:
    """Give ranks that are ``new`` the state of a rank that is not."""
    peer = next(rank for rank in range(core.world_size) if rank not in new)
    copy = _call(core, [peer], handlers.copy_of_now)
    for rank in new:
        _call(core, [rank], handlers.restore_snapshot, 0, True, each=[copy])


def _call(core: Group, ranks: Sequence[int], function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return the result of the first of some ranks of a group that gets new ranks.

    Raises:
        CallTimeout: a rank has not returned within 300 s.
        RemoteCallError, WorkerDiedError: a rank failed, or was lost.
    """
    call = run_on(core, function, *args, ranks=ranks, title="px.replace_ranks", checked=False, **options)
    return call.result(_RESTORED_WITHIN_S)[0]
