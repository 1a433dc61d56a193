"""Of the targets of a sync those that take calls, while others are replaced, restarted or broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phalanx.errors import PhalanxError
from phalanx.group.epoch import Epoch, GroupState
from phalanx.group.lifecycle import State
from phalanx.weights.sync_sides import SyncSide

__all__ = ["to_reachable"]


def to_reachable(
    targets: Sequence[SyncSide], to: GroupState, sync: Callable[[Sequence[SyncSide]], object]
) -> None:
    """Sync to a group, whose ranks its owner is about to let work, and to those of the other targets that take calls.

    Another may stop to while the sync is under way, since a thread replaces its ranks or it broke: then it is left out,
    and gets weights with what mends it.

    Raises:
        PhalanxError: what ``sync`` raised though no other target changed.
    """
    others = [side.core.life for side in targets if side.core.life is not to]
    while True:
        epochs = {life: life.epoch for life in others if life.lifecycle.state is State.READY}
        try:
            sync([side for side in targets if side.core.life is to or side.core.life in epochs])
            return
        except PhalanxError:
            others = [life for life, epoch in epochs.items() if _is_still(life, epoch)]
            if len(others) == len(epochs):
                raise


def _is_still(life: GroupState, epoch: Epoch) -> bool:
    return life.epoch is epoch and life.lifecycle.state is State.READY
