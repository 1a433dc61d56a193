"""Layouts cut by torch itself from a full tensor: the oracle that plans are compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from phalanx.topology.mesh import Mesh
from phalanx.weights.boxes import Box, LocalBox
from phalanx.weights.local_layout import MeshCut, placed_boxes
from phalanx.weights.manifest import HeldTensor, Manifest
from phalanx.weights.plan import Locations, Plan, RankLocation, make_plan
from phalanx.weights.tensors import Tensors, copy_ties, cut, name_of

AXES = ("pp", "dp", "fsdp", "ep", "tp")
EXPERTS = 4
STAGES = 4


@dataclass(frozen=True)
class Layout:
    """How one side holds a model: sizes of the mesh axes, and the dim of a matrix that FSDP and tp cut."""

    sizes: tuple[int, int, int, int, int]
    fsdp_dim: int | None = 0
    tp_dim: int | None = 0
    gated: bool = False

    @property
    def mesh(self) -> Mesh:
        return Mesh(**dict(zip(AXES, self.sizes, strict=True)))

    @property
    def ranks(self) -> int:
        return self.mesh.world_size

    def local(self, full: torch.Tensor, name: str, rank: int) -> torch.Tensor | None:
        """What ``rank`` holds of ``full``: tp cuts first, then FSDP, as FSDP2 does over tensor parallelism."""
        at = self.mesh.coordinates(rank)
        if not self._owns(name, at):
            return None
        part = full
        if self._dim(self.tp_dim, full) is not None:
            part = self._tp(part, at["tp"])
        if self._dim(self.fsdp_dim, full) is not None:
            part = _part(part, self.fsdp_dim or 0, at["fsdp"], self.mesh.size("fsdp"))
        return part.clone()

    def held(self, full: torch.Tensor, name: str, rank: int) -> HeldTensor | None:
        """The same as a manifest says it."""
        local = self.local(full, name, rank)
        if local is None:
            return None
        at = self.mesh.coordinates(rank)
        fsdp, tp = self._dim(self.fsdp_dim, full), self._dim(self.tp_dim, full)
        if self._gates(full):
            return self._held_gated(full, local, at)
        cuts: list[MeshCut] = []
        if fsdp is not None:
            cuts.append(
                MeshCut(fsdp, at["fsdp"], self.mesh.size("fsdp"), self.mesh.size("tp") if fsdp == tp else 1)
            )
        if tp is not None:
            cuts.append(MeshCut(tp, at["tp"], self.mesh.size("tp")))
        patches = placed_boxes(name, tuple(full.shape), cuts, tuple(local.shape))
        return HeldTensor(name_of(full.dtype), tuple(full.shape), patches)

    def _held_gated(self, full: torch.Tensor, local: torch.Tensor, at: dict[str, int]) -> HeldTensor:
        tp = self.mesh.size("tp")
        step = full.shape[0] // 2 // tp
        rest = tuple(full.shape[1:])
        zero = (0,) * len(rest)
        patches = [
            LocalBox(Box(((half * tp + at["tp"]) * step, *zero), (step, *rest)), (half * step, *zero))
            for half in (0, 1)
        ]
        return HeldTensor(name_of(full.dtype), tuple(full.shape), tuple(patches) if step else ())

    def _gates(self, full: torch.Tensor) -> bool:
        """Megatron's gated MLP: each rank has its part of both halves. Not cut further."""
        fits = self.tp_dim == 0 and full.dim() > 0 and full.shape[0] % (2 * self.mesh.size("tp")) == 0
        return self.gated and fits and self.mesh.size("fsdp") == 1

    def _tp(self, full: torch.Tensor, index: int) -> torch.Tensor:
        count = self.mesh.size("tp")
        if self._gates(full):
            return torch.cat([_part(half, 0, index, count) for half in full.chunk(2)])
        return _part(full, self.tp_dim or 0, index, count)

    def _owns(self, name: str, at: dict[str, int]) -> bool:
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        stage = numbers[0] * self.mesh.size("pp") // STAGES == at["pp"]
        expert = len(numbers) < 2 or numbers[1] * self.mesh.size("ep") // EXPERTS == at["ep"]
        return stage and expert

    def _dim(self, dim: int | None, full: torch.Tensor) -> int | None:
        return dim if dim is not None and dim < full.dim() else None


def _part(tensor: torch.Tensor, dim: int, index: int, count: int) -> torch.Tensor:
    parts = tensor.chunk(count, dim)
    return parts[index] if index < len(parts) else tensor.narrow(dim, 0, 0)


def model(shapes: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Tensors in which no two values are alike; some belong to an expert, all to a layer."""
    named: dict[str, torch.Tensor] = {}
    start = 0
    for layer in range(STAGES):
        for index, shape in enumerate(shapes):
            full = torch.zeros(tuple(shape), dtype=dtype)
            names = [f"layers.{layer}.w{index}"]
            if index % 2:
                names = [f"layers.{layer}.experts.{expert}.w{index}" for expert in range(EXPERTS)]
            for name in names:
                named[name] = (
                    (torch.arange(full.numel(), dtype=torch.float64) + start).view(full.shape).to(dtype)
                )
                start += full.numel()
    return named


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


def run_in_process(plan: Plan, sources: Sequence[Tensors], targets: Sequence[Tensors]) -> None:
    """Do all of a plan on tensors of this process, box by box without a buffer."""
    for _, pair, box in plan.transfers():
        sent = cut(sources[box.source][pair.source], box.source_at, box.box.sizes)
        for target in box.targets:
            cut(targets[target][pair.target], box.target_at, box.box.sizes).copy_(sent)
    for tensors in targets:
        copy_ties(plan, tensors)


def manifests(layout: Layout, named: dict[str, torch.Tensor]) -> list[Manifest]:
    found: list[Manifest] = []
    for rank in range(layout.ranks):
        held = {name: layout.held(full, name, rank) for name, full in named.items()}
        found.append(Manifest.of({name: one for name, one in held.items() if one is not None}))
    return found


def locals_of(layout: Layout, named: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    found: list[dict[str, torch.Tensor]] = []
    for rank in range(layout.ranks):
        held = {name: layout.local(full, name, rank) for name, full in named.items()}
        found.append({name: one for name, one in held.items() if one is not None})
    return found


def blank(tensors: Sequence[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Tensors of the same shapes, without the values."""
    return [{name: torch.full_like(one, -1) for name, one in rank.items()} for rank in tensors]


def _few(most: int) -> st.SearchStrategy[int]:
    return st.integers(1, most)


layouts = st.builds(
    Layout,
    st.tuples(_few(2), _few(2), _few(4), _few(2), _few(4)).filter(lambda sizes: math.prod(sizes) <= 64),
    st.sampled_from([0, 0, 1, None]),
    st.sampled_from([0, 0, 1, None]),
    st.booleans(),
)
shapes = st.lists(st.lists(st.integers(1, 13), max_size=3), min_size=1, max_size=2)
