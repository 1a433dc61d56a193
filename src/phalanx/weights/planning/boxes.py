"""Boxes of a global tensor, and the runs of indices that shards of one tensor dim are.

A rank never holds "a shard of FSDP": it holds boxes. Everything above the readers knows only these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

__all__ = [
    "Box",
    "Patch",
    "Run",
    "chunk",
    "meet",
    "patches_of",
    "strided_chunk",
    "volume",
    "whole",
    "without",
]

Run = tuple[int, int]
"""Indices ``start`` to ``start + length`` of one tensor dim, as (start, length)."""


class Box(NamedTuple):
    """A part of a global tensor: from ``offsets`` on, ``sizes`` long, one number per tensor dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        """As a reader of Python would index it: ``[0:4, 8:16]``."""
        cuts = zip(self.offsets, self.sizes, strict=True)
        return "[" + ", ".join(f"{offset}:{offset + size}" for offset, size in cuts) + "]"


class Patch(NamedTuple):
    """A box of the global tensor and where it lies in the rank's local tensor, ``at`` one offset per dim."""

    box: Box
    at: tuple[int, ...]


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor of ``shape``."""
    return Box((0,) * len(shape), tuple(shape))


def volume(box: Box) -> int:
    """How many elements ``box`` has; 1 for a tensor without dims."""
    return math.prod(box.sizes)


def meet(one: Box, other: Box) -> Box | None:
    """What two boxes of one tensor share, None where that is nothing."""
    offsets: list[int] = []
    sizes: list[int] = []
    for a, a_size, b, b_size in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True):
        start = a if a > b else b
        size = min(a + a_size, b + b_size) - start
        if size <= 0:
            return None
        offsets.append(start)
        sizes.append(size)
    return Box(tuple(offsets), tuple(sizes))


def without(box: Box, hole: Box) -> list[Box]:
    """``box`` less ``hole``, as disjoint boxes: at most two per tensor dim."""
    inner = meet(box, hole)
    if inner is None:
        return [box]
    left: list[Box] = []
    offsets, sizes = list(box.offsets), list(box.sizes)
    for dim, (start, size) in enumerate(zip(inner.offsets, inner.sizes, strict=True)):
        for begin, end in ((offsets[dim], start), (start + size, offsets[dim] + sizes[dim])):
            if end > begin:
                left.append(
                    Box(
                        (*offsets[:dim], begin, *offsets[dim + 1 :]),
                        (*sizes[:dim], end - begin, *sizes[dim + 1 :]),
                    )
                )
        offsets[dim], sizes[dim] = start, size
    return left


def chunk(runs: Sequence[Run], index: int, count: int) -> list[Run]:
    """Part ``index`` of the indices that ``runs`` list, cut in ``count`` as ``torch.chunk`` cuts.

    The first parts have ``ceil(n / count)`` indices, the last ones fewer or none.
    """
    step = -(-sum(length for _, length in runs) // count)
    return _between(runs, index * step, (index + 1) * step)


def strided_chunk(runs: Sequence[Run], index: int, count: int, pieces: int) -> list[Run]:
    """Part ``index`` of ``count`` of each of ``pieces`` chunks, one after another.

    This is what torch's ``_StridedShard(split_factor=pieces)`` says of a shard: FSDP over tensor parallelism.
    """
    taken = [run for piece in range(pieces) for run in chunk(chunk(runs, piece, pieces), index, count)]
    return list(_merged(taken))


def _between(runs: Iterable[Run], begin: int, end: int) -> list[Run]:
    found: list[Run] = []
    passed = 0
    for start, length in runs:
        low, high = max(begin - passed, 0), min(end - passed, length)
        if high > low:
            found.append((start + low, high - low))
        passed += length
    return found


def _merged(runs: Iterable[Run]) -> Iterator[Run]:
    last: Run | None = None
    for run in runs:
        if last is not None and last[0] + last[1] == run[0]:
            last = (last[0], last[1] + run[1])
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last


def patches_of(runs: Sequence[Sequence[Run]]) -> tuple[Patch, ...]:
    """The boxes of a local tensor whose dim ``i`` holds the global indices ``runs[i]``, in that order."""
    placed = [list(_placed(dim)) for dim in runs]
    return tuple(
        Patch(Box(tuple(r[0] for r in cut), tuple(r[1] for r in cut)), tuple(r[2] for r in cut))
        for cut in product(*placed)
    )


def _placed(runs: Sequence[Run]) -> Iterator[tuple[int, int, int]]:
    at = 0
    for start, length in _merged(runs):
        yield start, length, at
        at += length
