"""Boxes of a global tensor, and the runs of indices that make up a shard of a tensor dimension.

The shards of every kind of parallelism are described as boxes. Planning, digests and checkpoints use only boxes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from operator import add
from typing import NamedTuple

import numpy as np
import torch

from phalanx.wire.value import Dims


class Box(NamedTuple):
    """A hyper-rectangle of a global tensor: its first element and its size, in elements per dimension."""

    offsets: Dims
    sizes: Dims

    @property
    def ends(self) -> Dims:
        """The exclusive end of the box in each dimension."""
        return tuple(map(add, self.offsets, self.sizes))

    def __str__(self) -> str:
        """Return the box as a Python index: ``[0:4, 8:16]``."""
        return "[" + ", ".join(map("{}:{}".format, self.offsets, self.ends)) + "]"


class LocalBox(NamedTuple):
    """A box of the global tensor, and its position ``at`` in the rank's local tensor."""

    box: Box
    at: Dims


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a complete tensor of ``shape``."""
    return Box((0,) * len(shape), tuple(shape))


@functools.lru_cache(maxsize=1024)  # each sync compares the layout of each tensor
def complete(shape: Dims) -> tuple[LocalBox, ...]:
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


def blocks(sizes: Dims, limit: int) -> Iterator[tuple[Dims, Dims]]:
    """Yield (start, sizes) of the blocks of at most ``limit`` elements that make up a box of ``sizes``."""
    if math.prod(sizes) <= limit:
        yield (0,) * len(sizes), sizes
        return
    step = max(1, limit // math.prod(sizes[1:]))
    for row in range(0, sizes[0], step):
        for start, block in blocks(sizes[1:], limit):
            yield (row, *start), (min(step, sizes[0] - row), *block)


def cut(tensor: torch.Tensor, at: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return the part of ``tensor`` that begins at ``at``, as a view."""
    part = tensor.detach()
    for dim, (start, size) in enumerate(zip(at, sizes, strict=True)):
        if size != part.shape[dim]:
            part = part.narrow(dim, start, size)
    return part


class BoxIndex:
    """An index of the boxes of a tensor, to find intersections."""

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

    def hole(self, box: Box) -> Box | None:
        """Return a part of ``box`` that no box of the index covers; None if there is none."""
        edges = [{begin, begin + size} for begin, size in zip(*box, strict=True)]
        for _, part in self.meeting(box):
            for cuts, begin, size in zip(edges, *part, strict=True):
                cuts |= {begin, begin + size}
        for cell in product(*(pairwise(sorted(cuts)) for cuts in edges)):
            part = Box(tuple(begin for begin, _ in cell), tuple(end - begin for begin, end in cell))
            if not any(self.meeting(part)):
                return part
        return None


def chunk(runs: Sequence[range], index: int, count: int) -> list[range]:
    """Return chunk ``index`` of ``count`` of the indices in ``runs``, as ``torch.chunk`` divides them."""
    step = -(-sum(map(len, runs)) // count)
    begin = index * step
    part: list[range] = []
    for run in runs:
        part.append(run[max(begin, 0) : max(begin + step, 0)])
        begin -= len(run)
    return [run for run in part if run]


def strided_chunk(runs: Sequence[range], index: int, count: int, pieces: int) -> list[range]:
    """Divide ``runs`` into ``pieces`` chunks, and return chunk ``index`` of ``count`` of each, in sequence.

    This is the meaning of torch's ``_StridedShard(split_factor=pieces)``: FSDP over tensor parallelism. If ``pieces``
    is 1, the result is a plain chunk.
    """
    return [run for piece in range(pieces) for run in chunk(chunk(runs, piece, pieces), index, count)]


def local_boxes(runs: Sequence[Sequence[range]]) -> tuple[LocalBox, ...]:
    """Return the boxes of a local tensor whose dimension ``i`` holds the global indices ``runs[i]``, in that order."""
    boxes: list[LocalBox] = []
    for cut in product(*map(_place, runs)):
        box = Box(tuple(run.start for run, _ in cut), tuple(len(run) for run, _ in cut))
        boxes.append(LocalBox(box, tuple(at for _, at in cut)))
    return tuple(boxes)


def _place(runs: Sequence[range]) -> list[tuple[range, int]]:
    """Return each run with its position in the local dimension. Adjacent runs are merged."""
    placed: list[tuple[range, int]] = []
    position = 0
    for run in runs:
        if placed and placed[-1][0].stop == run.start:
            first, at = placed.pop()
            placed.append((range(first.start, run.stop), at))
        else:
            placed.append((run, position))
        position += len(run)
    return placed
