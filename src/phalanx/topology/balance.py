"""Partition of rows into parts of about equal total length, for dispatch that balances work over dp ranks."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Any

from phalanx.config import is_number
from phalanx.errors import DispatchError

# The cost of differencing is items x parts. Above this product the greedy method is as good (its error is at most the
# length of the shortest items) and much faster.
_DIFFERENCING_LIMIT = 1 << 17

Weight = tuple[float, int]
"""Total length and number of items; the number breaks ties, so that items of length 0 are spread too."""
Bin = tuple[Weight, Any]
"""A part: its weight, and the tree of its groups."""
Groups = Sequence[tuple[float, int]]
"""Total length and number of each group of rows."""
Partition = list[list[int]]
"""The groups, or the rows, of each part."""


def balanced_partition(
    lengths: Sequence[float], parts: int, *, group_size: int = 1, equal_counts: bool = False
) -> Partition:
    """Return the row indices of each of ``parts`` parts, such that the largest sum of lengths is small.

    ``group_size`` consecutive rows stay together (the samples of a prompt); the rows must fill complete groups. With
    ``equal_counts`` the parts' numbers of groups differ by at most 1. Rows ascend within a part, parts ascend by their
    first row, and empty parts (if there are fewer groups than parts) come last. Equal input returns the same partition.

    The result is the better of largest differencing (N. Karmarkar, R. M. Karp, "The Differencing Method of Set
    Partitioning", 1982, in its form for several parts) and longest-first greedy (R. L. Graham, 1969).

    Raises:
        DispatchError: if a length is not a finite number of at least 0.
    """
    for row, length in enumerate(lengths):
        if not is_number(length) or not 0 <= length < math.inf:
            raise DispatchError(
                f"the length of row {row} is {length!r:.80}; expected one finite number from 0 for each row"
            )
    count = len(lengths)
    groups = [(math.fsum(lengths[i : i + group_size]), i // group_size) for i in range(0, count, group_size)]
    groups.sort(key=lambda item: (-item[0], item[1]))
    found = _even_counts(groups, parts) if equal_counts else _any_counts(groups, parts)
    members = sorted((sorted(part) for part in found), key=lambda part: part[0] if part else count)
    return [[g * group_size + i for g in part for i in range(group_size)] for part in members]


def _any_counts(groups: Groups, parts: int) -> Partition:
    if len(groups) <= parts:
        return [[g] for _, g in groups] + [[] for _ in range(parts - len(groups))]
    greedy = _greedy(groups, parts)
    if len(groups) * parts > _DIFFERENCING_LIMIT:
        return greedy
    differenced = _difference([[item] for item in groups], parts)
    return min(differenced, greedy, key=lambda found: _largest(found, groups))


def _even_counts(groups: Groups, parts: int) -> Partition:
    """Partition layers of ``parts`` items of similar length, such that each part gets an item of every layer."""
    layers = [groups[i : i + parts] for i in range(0, len(groups), parts)]
    return _difference(layers, parts) if layers else [[] for _ in range(parts)]


def _greedy(groups: Groups, parts: int) -> Partition:
    """Assign the longest item first, each to the part with the smallest sum so far."""
    found: Partition = [[] for _ in range(parts)]
    heap = [(0.0, 0, part) for part in range(parts)]
    for length, group in groups:
        total, count, part = heap[0]
        found[part].append(group)
        heapq.heapreplace(heap, (total + length, count + 1, part))
    return found


class _State:
    """A partial partition: the weights of all parts, heaviest first, each with a tree of its groups."""

    __slots__ = ("bins", "order")

    def __init__(self, bins: list[Bin], order: int) -> None:
        self.bins = sorted(bins, key=lambda entry: entry[0], reverse=True)
        self.order = order

    def __lt__(self, other: _State) -> bool:
        """Order by the difference between heaviest and lightest part, largest first; then by age, oldest first."""
        return (*self._spread(), -self.order) > (*other._spread(), -other.order)

    def _spread(self) -> Weight:
        (heavy, count), (light, least) = self.bins[0][0], self.bins[-1][0]
        return heavy - light, count - least


def _difference(layers: Sequence[Groups], parts: int) -> Partition:
    """Merge the two states of largest spread, heaviest part with lightest, until a single state is left."""
    empty: list[Bin] = [((0.0, 0), ())]
    heap = [
        _State([((length, 1), group) for length, group in layer] + empty * (parts - len(layer)), order)
        for order, layer in enumerate(layers)
    ]
    heapq.heapify(heap)
    order = len(heap)
    while len(heap) > 1:
        a, b = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(
            heap, _State([_joined(x, y) for x, y in zip(a.bins, reversed(b.bins), strict=True)], order)
        )
        order += 1
    return [list(_leaves(tree)) for _, tree in heap[0].bins]


def _joined(a: Bin, b: Bin) -> Bin:
    """Join two parts. The groups are kept as a tree, since joining trees takes constant time."""
    (length, count), tree = a
    (other_length, other_count), other = b
    return (length + other_length, count + other_count), (tree, other)


def _leaves(tree: Any) -> Iterable[int]:
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, tuple):
            waiting += node
        else:
            yield node


def _largest(found: Partition, groups: Groups) -> float:
    length_of = {group: length for length, group in groups}
    return max(math.fsum(length_of[group] for group in part) for part in found)
