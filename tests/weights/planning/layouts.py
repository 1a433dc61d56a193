"""Random layouts of tensors over the ranks of a side. Shards are cut out of golden tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
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
    """The boxes of each rank of a tensor, as (offsets, sizes). In the local tensor they are stacked along ``dim``."""

    dim: int
    boxes: tuple[tuple[Box, ...], ...]

    def held(self, full: torch.Tensor, rank: int) -> tuple[torch.Tensor, px.weights.ShardSpec] | None:
        """Return a rank's boxes of a tensor, concatenated, and their spec. None if it has no box."""
        boxes = self.boxes[rank]
        parts = [full[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))] for box in boxes]
        if not parts:
            return None
        local = torch.cat(parts, self.dim) if len(parts) > 1 else parts[0].clone()
        return local, px.weights.ShardSpec(tuple(full.shape), boxes, self.dim)


def box_of(shape: Shape, ranges: dict[int, tuple[int, int]]) -> Box:
    """Return the box with the (begin, end) of some dims, and all of the others."""
    found = [ranges.get(dim, (0, size)) for dim, size in enumerate(shape)]
    return tuple(begin for begin, _ in found), tuple(end - begin for begin, end in found)


@dataclass(frozen=True)
class Side:
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
    """Split a tensor along a dim among owners, one or several of each part, or in a grid of two dims."""
    if not shape:
        return Layout(0, ((((), ()),),) * ranks)
    dim = draw(st.integers(0, len(shape) - 1))
    cuts = draw(st.lists(st.integers(0, shape[dim]), max_size=4))
    parts = [{dim: part} for part in pairwise(sorted({0, shape[dim], *cuts}))]
    if len(shape) > 1 and draw(st.booleans()):
        other = (dim + 1) % len(shape)
        step, size = -(-shape[other] // ranks), shape[other]
        ends = [min(rank * step, size) for rank in range(ranks + 1)]
        grid = (tuple(box_of(shape, part | {other: own}) for part in parts) for own in pairwise(ends))
        return Layout(dim, tuple(grid))
    some = st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks, unique=True)
    owners = itertools.cycle(draw(st.lists(some, min_size=1, max_size=4)))
    owned = [(box_of(shape, part), next(owners)) for part in parts]
    return Layout(dim, tuple(tuple(box for box, own in owned if rank in own) for rank in range(ranks)))


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
