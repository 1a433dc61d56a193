"""Random layouts of tensors over the ranks of a side. Shards are cut out of golden tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

import phalanx as px
from phalanx.weights.local_layout import LocalLayout, read_tensors
from phalanx.weights.manifest import Manifest
from phalanx.weights.plan import Locations, Plan, RankLocation, make_plan

Shape = tuple[int, ...]
Tensors = dict[str, torch.Tensor]
Box = tuple[Shape, Shape]


@dataclass(frozen=True)
class Layout:
    """One tensor split along ``dim`` at ``edges``; ``owners`` are the ranks of each part, one or several.

    ``across`` is the number of ranks, if all ranks own all parts. It splits the parts again, along the next dim:
    each rank has the piece of its number.
    """

    dim: int
    edges: tuple[int, ...]
    owners: tuple[tuple[int, ...], ...]
    across: int | None = None

    def boxes(self, shape: Shape, rank: int) -> list[Box]:
        """Return offsets and sizes of the boxes of a rank."""
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
        """Return a rank's boxes of a tensor, concatenated, and their spec. None if it has no box."""
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
    """The ranks of a side, and the layout of each tensor."""

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


def golden(shapes: Sequence[Shape]) -> Tensors:
    return {
        f"w{index}": torch.randn(shape, generator=torch.Generator().manual_seed(index))
        for index, shape in enumerate(shapes)
    }


def read(side: Side, full: Tensors) -> list[LocalLayout]:
    """Return the layout that is read from the tensors of each rank."""
    return [read_tensors(side.tensors(full, rank), side.boxes(full, rank)) for rank in range(side.ranks)]


def apart(sources: int, targets: int) -> Locations:
    """Every rank on a node of its own."""
    sides = (("source", sources), ("target", targets))
    return Locations(
        *(tuple(RankLocation(f"{s} {n}", f"{s} {n}") for n in range(count)) for s, count in sides)
    )


def one_node(sources: int, targets: int) -> Locations:
    """All ranks on one node, each a process of its own."""
    return Locations(*(tuple(one._replace(node="node") for one in side) for side in apart(sources, targets)))


def plan_of(
    sources: list[Manifest], targets: list[Manifest], places: Locations | None = None, **rules: Any
) -> Plan:
    return make_plan(sources, targets, places or apart(len(sources), len(targets)), **rules)
