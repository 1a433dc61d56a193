"""Creation of snapshots: the state of each rank is copied into the memory of another rank."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Collection, Sequence

from phalanx.calls.run_on import outputs_on, run_on
from phalanx.group.epoch import Epoch, Snapshot
from phalanx.group.group import Group
from phalanx.wire.value import Value
from phalanx.worker import handlers


def take_together(cores: Sequence[Group]) -> list[Snapshot]:
    """Take snapshots of groups that this driver owns; they count only if all of them succeed.

    A group that is broken, or breaks during the snapshot, is not recovered, since it would return to the previous
    snapshot.

    Raises:
        GroupBroken: if a group is broken.
    """
    with contextlib.ExitStack() as held:  # no two snapshots at once, and none during a change of members
        for core in in_one_order(cores):
            held.enter_context(core.as_it_is())
        epochs = [core.check() for core in cores]
        taken = [_taken(core, epoch) for core, epoch in zip(cores, epochs, strict=True)]
        for core, epoch, found in zip(cores, epochs, taken, strict=True):
            core.snapshot, core.snapshot_epoch = found, epoch.number
            core.spare = True  # surviving ranks hold snapshots now
        return taken


def in_one_order(cores: Sequence[Group]) -> list[Group]:
    """Sort groups in the order in which they are locked, to prevent deadlocks."""
    return sorted(cores, key=lambda one: one.handle.number)


def _taken(core: Group, epoch: Epoch) -> Snapshot:
    began = time.monotonic()
    last = 0 if core.snapshot is None else core.snapshot.number
    number, again, alone = last + 1, core.snapshot_epoch == epoch.number, epoch.size == 1
    held_by, title = holders(epoch.nodes), "px.snapshot"
    taken = run_on(core, handlers.take_snapshot, number, last, again, title=title).result(None)
    if not alone:
        kept: list[dict[int, Value]] = [{} for _ in taken]
        for rank, changes in enumerate(outputs_on(core, handlers.changes)):
            kept[held_by[rank]][rank] = changes
        run_on(core, handlers.hold_copies, number, last, each=kept, title=title).result(None)
    nbytes = sum(copied for copied, _ in taken)
    sent = 0 if alone else sum(changed for _, changed in taken)
    return Snapshot(number, held_by, nbytes, sent, time.monotonic() - began)


def holders(nodes: Sequence[str]) -> tuple[int, ...]:
    """Return, by rank, the holder of its second copy: the next rank on another node, or else simply the next rank.

    If nodes have equally many ranks, they hold equally many copies.

    Args:
        nodes: node of each rank.
    """
    count = len(nodes)
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    names = list(by_node)
    if len(names) < 2:
        return tuple((rank + 1) % count for rank in range(count))
    found: dict[int, int] = {}
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        found |= zip(by_node[name], itertools.cycle(by_node[following]), strict=False)
    return tuple(found[rank] for rank in range(count))


def lost_copies(held_by: Sequence[int], gone: Collection[int]) -> list[int]:
    """Return the ranks in ``gone`` whose state has no copy any more."""
    return [rank for rank in sorted(gone) if held_by[rank] in gone]
