"""Boxes of a global tensor, and the runs of indices that a shard of a tensor dimension consists of.

A rank holds boxes, whatever parallelism made them. Planning, digests and checkpoints know only boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from operator import add
from typing import NamedTuple

import numpy as np

Run = tuple[int, int]
"""Indices ``start`` to ``start + length`` of a tensor dimension, as (start, length)."""


class Box(NamedTuple):
    """A part of a global tensor: ``sizes`` elements from ``offsets`` on, a number per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """The offsets behind the last elements."""
        return tuple(map(add, self.offsets, self.sizes))

    def __str__(self) -> str:
        """Return the box as a Python index: ``[0:4, 8:16]``."""
        return "[" + ", ".join(map("{}:{}".format, self.offsets, self.ends)) + "]"


class LocalBox(NamedTuple):
    """A box of the global tensor, and its position ``at`` in the rank's local tensor."""

    box: Box
    at: tuple[int, ...]


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a complete tensor of ``shape``."""
    return Box((0,) * len(shape), tuple(shape))


def complete(shape: Sequence[int]) -> tuple[LocalBox, ...]:
    """Return the boxes of a rank that has a complete tensor of ``shape``."""
    return (LocalBox(whole(shape), (0,) * len(shape)),)


def volume(box: Box) -> int:
    """Return the number of elements of ``box``; 1 for a tensor without dimensions."""
    return math.prod(box.sizes)


def meet(box: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes of a tensor; None if it is empty."""
    begins = tuple(map(max, box.offsets, other.offsets))
    sizes = tuple(
        min(end, last) - begin for begin, end, last in zip(begins, box.ends, other.ends, strict=True)
    )
    return Box(begins, sizes) if all(size > 0 for size in sizes) else None


def without(box: Box, hole: Box) -> list[Box]:
    """Return ``box`` less ``hole`` as disjoint boxes: at most two per dimension."""
    inner = meet(box, hole)
    if inner is None:
        return [box]
    rest: list[Box] = []
    offsets, sizes = list(box.offsets), list(box.sizes)
    for dim, (start, size) in enumerate(zip(inner.offsets, inner.sizes, strict=True)):
        for begin, end in ((offsets[dim], start), (start + size, offsets[dim] + sizes[dim])):
            if end > begin:
                before, after = (*offsets[:dim], begin), (*sizes[:dim], end - begin)
                rest.append(Box((*before, *offsets[dim + 1 :]), (*after, *sizes[dim + 1 :])))
        offsets[dim], sizes[dim] = start, size
    return rest


def blocks(sizes: tuple[int, ...], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Divide ``sizes`` into blocks of at most ``limit`` elements, as (start, sizes)."""
    inner = math.prod(sizes[1:])
    if math.prod(sizes) <= limit:
        yield (0,) * len(sizes), sizes
    elif inner > limit:
        for row in range(sizes[0]):
            for start, block in blocks(sizes[1:], limit):
                yield (row, *start), (1, *block)
    else:
        step = limit // inner
        for row in range(0, sizes[0], step):
            yield (row, *(0,) * (len(sizes) - 1)), (min(step, sizes[0] - row), *sizes[1:])


class BoxIndex:
    """Boxes of a tensor, among which intersections are found."""

    def __init__(self, boxes: Iterable[Box]) -> None:
        self._boxes = list(boxes)
        self._begins = np.array([box.offsets for box in self._boxes])
        self._ends = np.array([box.ends for box in self._boxes])

    def meeting(self, box: Box) -> Iterator[tuple[Box, Box]]:
        """Yield each box that intersects ``box``, and the intersection."""
        if self._boxes:
            begins, ends = np.maximum(self._begins, box.offsets), np.minimum(self._ends, box.ends)
            hits = np.flatnonzero((begins < ends).all(1))
            parts = hits.tolist(), begins[hits].tolist(), (ends - begins)[hits].tolist()
            for index, offsets, sizes in zip(*parts, strict=True):
                yield self._boxes[index], Box(tuple(offsets), tuple(sizes))

    def overlap(self) -> tuple[Box, Box] | None:
        """Return two boxes that overlap; None if all are disjoint."""
        pairs = ((box, other) for box in self._boxes for other, _ in self.meeting(box))
        return next((pair for pair in pairs if pair[0] is not pair[1]), None)


def chunk(runs: Sequence[Run], index: int, count: int) -> list[Run]:
    """Return chunk ``index`` of ``count`` of the indices in ``runs``, as ``torch.chunk`` divides them."""
    step = -(-sum(length for _, length in runs) // count)
    begin, end = index * step, (index + 1) * step
    part: list[Run] = []
    passed = 0
    for start, length in runs:
        low, high = max(begin - passed, 0), min(end - passed, length)
        if high > low:
            part.append((start + low, high - low))
        passed += length
    return part


def strided_chunk(runs: Sequence[Run], index: int, count: int, pieces: int) -> list[Run]:
    """Return chunk ``index`` of ``count`` of each of ``pieces`` chunks, in sequence.

    This is the meaning of torch's ``_StridedShard(split_factor=pieces)``: FSDP over tensor parallelism. With one piece
    it is a plain chunk.
    """
    return [run for piece in range(pieces) for run in chunk(chunk(runs, piece, pieces), index, count)]


def local_boxes(runs: Sequence[Sequence[Run]]) -> tuple[LocalBox, ...]:
    """Return the boxes of a local tensor whose dimension ``i`` holds the global indices ``runs[i]``, in that order."""
    return tuple(
        LocalBox(Box(tuple(r[0] for r in cut), tuple(r[1] for r in cut)), tuple(r[2] for r in cut))
        for cut in product(*map(_place, runs))
    )


def _place(runs: Sequence[Run]) -> list[tuple[int, int, int]]:
    """Return (start, length, position in the local dimension) of each run. Adjacent runs become a single run."""
    placed: list[tuple[int, int, int]] = []
    position = 0
    for start, length in runs:
        if placed and placed[-1][0] + placed[-1][1] == start:
            first, before, at = placed[-1]
            placed[-1] = first, before + length, at
        else:
            placed.append((start, length, position))
        position += length
    return placed
