"""Through the whole link, from any layout to any other: every target rank has its part of the golden tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import phalanx as px
from tests.weights.weight_workers import NAME, Accepter, Publisher, arrived, groups, same

Shape = tuple[int, ...]
Tensors = dict[str, torch.Tensor]
Box = tuple[Shape, Shape]


@dataclass(frozen=True)
class Layout:
    """One tensor cut along ``dim`` at ``edges``; ``owners`` are the ranks that hold each part, which may be several.

    ``across`` cuts what each rank holds once more, along the next dim, in as many parts as there are ranks: a rank
    has the part of its number, where all ranks hold all the rest.
    """

    dim: int
    edges: tuple[int, ...]
    owners: tuple[tuple[int, ...], ...]
    across: int | None = None

    def boxes(self, shape: Shape, rank: int) -> list[Box]:
        """Of a rank: offsets and sizes."""
        found = [
            (begin, end - begin)
            for index, (begin, end) in enumerate(zip(self.edges, self.edges[1:], strict=False))
            if rank in self.owners[index % len(self.owners)]
        ]
        return [self._box(shape, begin, size, rank) for begin, size in found]

    def _box(self, shape: Shape, begin: int, size: int, rank: int) -> Box:
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[self.dim], sizes[self.dim] = begin, size
        if self.across is not None:
            dim = (self.dim + 1) % len(shape)
            step = -(-shape[dim] // self.across)
            offsets[dim] = min(rank * step, shape[dim])
            sizes[dim] = min(step, shape[dim] - offsets[dim])
        return tuple(offsets), tuple(sizes)

    def held(self, full: torch.Tensor, rank: int) -> tuple[torch.Tensor, px.weights.ShardSpec] | None:
        """What a rank has of a tensor, its boxes one after another; None where it has nothing."""
        shape = tuple(full.shape)
        if not shape:
            return full.clone(), px.weights.ShardSpec((), (((), ()),))
        boxes = self.boxes(shape, rank)
        parts = [full[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))] for box in boxes]
        return (
            (torch.cat(parts, self.dim), px.weights.ShardSpec(shape, tuple(boxes), self.dim))
            if parts
            else None
        )


@dataclass(frozen=True)
class Side:
    """Ranks, and how each tensor lies on them."""

    ranks: int
    layouts: tuple[Layout, ...]
    dtype: torch.dtype

    def tensors(self, full: Tensors, rank: int) -> Tensors:
        return {name: one[0].to(self.dtype) for name, one in self._held(full, rank).items()}

    def boxes(self, full: Tensors, rank: int) -> dict[str, px.weights.ShardSpec]:
        return {name: one[1] for name, one in self._held(full, rank).items()}

    def _held(self, full: Tensors, rank: int) -> dict[str, tuple[torch.Tensor, px.weights.ShardSpec]]:
        pairs = zip(full.items(), self.layouts, strict=True)
        found = {name: layout.held(one, rank) for (name, one), layout in pairs}
        return {name: one for name, one in found.items() if one is not None}


@st.composite
def layouts(draw: st.DrawFn, shape: Shape, ranks: int) -> Layout:
    if not shape:
        return Layout(0, (), ())
    dim = draw(st.integers(0, len(shape) - 1))
    cuts = draw(st.lists(st.integers(0, shape[dim]), max_size=4))
    edges = tuple(sorted({0, shape[dim], *cuts}))
    if len(shape) > 1 and draw(st.booleans()):
        return Layout(dim, edges, (tuple(range(ranks)),), across=ranks)
    some = st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks, unique=True)
    owners = draw(st.lists(some.map(tuple), min_size=1, max_size=4))
    return Layout(dim, edges, tuple(owners))


@st.composite
def sides(draw: st.DrawFn, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]) -> Side:
    ranks = draw(st.integers(1, 6))
    return Side(ranks, tuple(draw(layouts(shape, ranks)) for shape in shapes), draw(st.sampled_from(dtypes)))


@st.composite
def syncs(draw: st.DrawFn) -> tuple[list[Shape], Side, Side]:
    shapes = draw(st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=3))
    return (
        shapes,
        draw(sides(shapes, [torch.float32])),
        draw(sides(shapes, [torch.float32, torch.bfloat16])),
    )


def golden(shapes: Sequence[Shape]) -> Tensors:
    return {
        f"w{index}": torch.randn(shape, generator=torch.Generator().manual_seed(index))
        for index, shape in enumerate(shapes)
    }


@given(syncs())
@settings(max_examples=25)
def test_every_target_rank_gets_its_part_of_every_tensor_bit_for_bit(
    case: tuple[list[Shape], Side, Side],
) -> None:
    shapes, source, target = case
    full = golden(shapes)
    blank: dict[str, Any] = {name: torch.full_like(one, -1) for name, one in full.items()}
    publishing = Publisher.bind(
        lambda rank: source.tensors(full, rank), boxes=lambda rank: source.boxes(full, rank)
    )
    accepting = Accepter.bind(
        lambda rank: target.tensors(blank, rank), boxes=lambda rank: target.boxes(full, rank)
    )
    with groups(publishing, accepting, sizes=(source.ranks, target.ranks)) as (one, other):
        px.WeightSync(one, other, NAME, verify="full", bucket_bytes=4096)()

        for rank in range(target.ranks):
            assert same(arrived(other, rank), target.tensors(full, rank))
