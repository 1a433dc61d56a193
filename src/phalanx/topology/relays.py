"""The tree of processes by which calls reach the ranks of a large group: who is below whom. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import isqrt

FAN_OUT = 32
HEADS = 8
LEAVES = 3
"""How many relays with ranks below them a driver calls itself. Each costs it about the CPU of two ranks; where there
are more, fewer relays over these cost it less, for one more hop."""


@dataclass(frozen=True)
class Relay:
    """One process: it has ranks below it, all on its own node, or other relays by their index in the tree.

    ``ranks`` are all ranks that are reached through it, in the order in which those below it have them.
    """

    node: str
    ranks: tuple[int, ...]
    below: tuple[int, ...] = ()


@dataclass(frozen=True)
class RelayTree:
    """Relays, each after all that are below it; the last ``heads`` of them are those that the driver calls."""

    relays: tuple[Relay, ...]
    heads: int

    @property
    def head_indices(self) -> range:
        """The heads by their index in the tree."""
        return range(len(self.relays) - self.heads, len(self.relays))

    @property
    def hops(self) -> int:
        """Messages from the driver to a rank, one after another, on the longest way."""
        hops: list[int] = []
        for relay in self.relays:
            hops.append(1 + max((hops[index] for index in relay.below), default=1))
        return max(hops)

    def above(self, rank: int) -> tuple[int, ...]:
        """The relays through which a call to that rank goes, the head first."""
        for head in self.head_indices:
            if rank in self.relays[head].ranks:
                return self._path(head, rank)
        return ()

    def _path(self, index: int, rank: int) -> tuple[int, ...]:
        for below in self.relays[index].below:
            if rank in self.relays[below].ranks:
                return (index, *self._path(below, rank))
        return (index,)


def plan_relays(nodes: Sequence[str], fan_out: int = FAN_OUT, heads: int = HEADS) -> RelayTree:
    """The tree for ranks that lie on these nodes, by rank.

    Those of one node are shared out evenly over as few relays there as have ``fan_out`` each at most. Over more than
    ``LEAVES`` of these, and over more relays than ``heads``, there are others until no more are left: as few as have
    ``fan_out`` each, but several where there are many to reach, which then work at a time.

    Raises:
        ValueError: no ranks, or a number below 2 of ``fan_out``, or below 1 of ``heads``.
    """
    if not nodes or fan_out < 2 or heads < 1:
        raise ValueError(
            f"relays for {len(nodes)} ranks with fan-out {fan_out} and {heads} heads: expected >= 1, 2, 1"
        )
    on: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        on.setdefault(node, []).append(rank)
    relays = [
        Relay(node, tuple(ranks[begin:end]))
        for node, ranks in on.items()
        for begin, end in _even(len(ranks), -(-len(ranks) // fan_out))
    ]
    level = range(len(relays))
    most = min(LEAVES, heads)
    while len(level) > most:
        count = max(-(-len(level) // fan_out), min(isqrt(len(level)), heads // 2))
        for begin, end in _even(len(level), count):
            below = tuple(level[begin:end])
            ranks = tuple(chain.from_iterable(relays[index].ranks for index in below))
            relays.append(Relay(relays[below[0]].node, ranks, below))
        level, most = range(len(relays) - count, len(relays)), heads
    return RelayTree(tuple(relays), len(level))


def _even(total: int, count: int) -> list[tuple[int, int]]:
    """Bounds of ``count`` runs of almost equal length."""
    return [(total * index // count, total * (index + 1) // count) for index in range(count)]
