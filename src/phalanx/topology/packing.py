"""Whether blocks of slots fit on nodes: bin packing, decided before anything is reserved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# States visited before the search gives up; ordinary clusters need fewer than ten per block.
_SEARCH_LIMIT = 20_000


@dataclass(frozen=True)
class Packing:
    """``nodes[i]`` is the index of the node that gets block ``i``; None where there is no such packing.

    ``decided`` is False where the search was cut off, so that a packing may exist after all.
    """

    nodes: tuple[int, ...] | None
    decided: bool = True

    @property
    def possible(self) -> bool:
        """Whether a packing exists, or at least could not be ruled out."""
        return self.nodes is not None or not self.decided


def pack(blocks: Sequence[int], capacities: Sequence[int]) -> Packing:
    """Put each block whole on one node; ``capacities`` are in slots. Blocks may share a node.

    Largest blocks first into the fullest node that holds them; where that fails, all choices are searched.
    """
    if not blocks:
        return Packing(())
    if not capacities or sum(blocks) > sum(capacities) or max(blocks) > max(capacities):
        return Packing(None)
    order = sorted(range(len(blocks)), key=lambda i: (-blocks[i], i))
    sizes = [blocks[i] for i in order]
    chosen = _best_fit(sizes, list(capacities))
    decided = True
    if chosen is None:
        search = _Search(sizes, list(capacities))
        chosen = search.run()
        decided = not search.cut_off
    if chosen is None:
        return Packing(None, decided)
    node_of = dict(zip(order, chosen, strict=True))
    return Packing(tuple(node_of[i] for i in range(len(blocks))))


def _best_fit(sizes: Sequence[int], free: list[int]) -> list[int] | None:
    chosen: list[int] = []
    for size in sizes:
        fitting = [node for node, slots in enumerate(free) if slots >= size]
        if not fitting:
            return None
        node = min(fitting, key=lambda n: (free[n], n))
        free[node] -= size
        chosen.append(node)
    return chosen


class _Search:
    """Depth-first over nodes for each block; equal nodes are tried once, dead states are remembered."""

    def __init__(self, sizes: Sequence[int], free: list[int]) -> None:
        self.sizes = sizes
        self.free = free
        self.dead: set[tuple[int, ...]] = set()
        self.cut_off = False

    def run(self) -> list[int] | None:
        """The node of each block, or None. A stack of choices, as blocks may outnumber Python's frames."""
        chosen: list[int] = []
        choices = [self._choices(0)]
        visited = 0
        while choices:
            visited += 1
            if visited > _SEARCH_LIMIT:
                self.cut_off = True
                return None
            node = choices[-1].pop() if choices[-1] else None
            if node is None:
                choices.pop()
                self._step_back(chosen)
                continue
            self.free[node] -= self.sizes[len(chosen)]
            chosen.append(node)
            if len(chosen) == len(self.sizes):
                return chosen
            choices.append(self._choices(len(chosen)))
        return None

    def _step_back(self, chosen: list[int]) -> None:
        self.dead.add(self._state(len(chosen)))
        if chosen:
            node = chosen.pop()
            self.free[node] += self.sizes[len(chosen)]

    def _choices(self, block: int) -> list[int]:
        """Nodes for ``block``, the fullest last (tried first); one node of each free size."""
        if self._state(block) in self.dead or not self._room_is_left(block):
            return []
        by_free = {slots: node for node, slots in enumerate(self.free) if slots >= self.sizes[block]}
        return [by_free[slots] for slots in sorted(by_free, reverse=True)]

    def _room_is_left(self, block: int) -> bool:
        """Nodes smaller than the smallest block left are of no use to any."""
        smallest = self.sizes[-1]
        return sum(slots for slots in self.free if slots >= smallest) >= sum(self.sizes[block:])

    def _state(self, block: int) -> tuple[int, ...]:
        return block, *sorted(self.free)
