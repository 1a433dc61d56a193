"""Placement of snapshots: the holders of the copies of ranks' states, and the copies that a loss affects. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from phalanx.display.byte_format import size


@dataclass(frozen=True)
class Snapshot:
    """Result of ``px.snapshot``.

    Attributes:
        number: counts the snapshots of the group, from 1.
        holders: by rank, the rank whose process has a second copy of its state; itself if there is no other rank.
        nbytes: bytes of the state of all ranks, each counted once.
        sent_bytes: bytes sent to the holders this time; unchanged tensors are not sent again.
        seconds: duration of the snapshot, for which calls of the group waited.
    """

    number: int
    holders: tuple[int, ...]
    nbytes: int
    sent_bytes: int
    seconds: float

    def without(self, gone: Collection[int]) -> Snapshot:
        """Return the snapshot after ``gone`` ranks were lost with the copies that they held for others."""
        held_by = (rank if holder in gone else holder for rank, holder in enumerate(self.holders))
        return replace(self, holders=tuple(held_by))

    def __str__(self) -> str:
        return (
            f"snapshot {self.number}: {size(self.nbytes)}, {size(self.sent_bytes)} sent, {self.seconds:.2f} s"
        )


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
    found = [0] * count
    for index, name in enumerate(names):
        others = by_node[names[(index + 1) % len(names)]]
        for place, rank in enumerate(by_node[name]):
            found[rank] = others[place % len(others)]
    return tuple(found)


def lost_copies(held_by: Sequence[int], gone: Collection[int]) -> list[int]:
    """Return the ranks in ``gone`` whose state has no copy any more."""
    return [rank for rank in sorted(gone) if held_by[rank] in gone]
