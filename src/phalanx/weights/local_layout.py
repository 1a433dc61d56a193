"""The layout of a rank's tensors, read from a module or a mapping: plain tensors, DTensors and stated boxes.

The boxes of a DTensor are computed from mesh and placements and compared with the local shape. Torch's
``compute_local_shape_and_global_offset``, which DCP uses too, is wrong without an error for uneven dimensions under
FSDP over tensor parallelism if a rank's chunk is missing, and for strided shards without the shard that they stride
over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from phalanx.errors import DeclarationError
from phalanx.weights.boxes import Box, LocalBox, Run, chunk, local_boxes, strided_chunk, volume, whole
from phalanx.weights.manifest import DTYPE_BYTES, HeldTensor, Manifest
from phalanx.weights.tensors import name_of


@dataclass(frozen=True)
class ShardSpec:
    """The layout of a tensor that is sharded by hand: its global shape and the boxes on this rank.

    Args:
        shape: shape of the global tensor.
        boxes: (offsets, sizes) of each box. A single box is the complete local tensor. Several boxes lie one after
            another along ``dim`` of it.
        dim: dimension along which several boxes are stacked in the local tensor.
    """

    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    dim: int = 0

    def local_boxes(self, name: str, local: tuple[int, ...]) -> tuple[LocalBox, ...]:
        """Return the boxes with their positions in a local tensor of shape ``local``.

        Raises:
            DeclarationError: if the boxes do not fill the local tensor.
        """
        boxes: list[LocalBox] = []
        end = 0
        for offsets, sizes in self.boxes:
            at = tuple(end if dim == self.dim else 0 for dim in range(len(sizes)))
            boxes.append(LocalBox(Box(tuple(offsets), tuple(sizes)), at))
            end += sizes[self.dim] if sizes else 0
        stacked = {
            tuple(end if dim == self.dim else size for dim, size in enumerate(box.sizes)) for box, _ in boxes
        }
        if stacked != {tuple(local)} and not (not boxes and 0 in local):
            raise DeclarationError(
                f"{name}: the stated boxes {[str(box) for box, _ in boxes]} do not make up the local tensor of shape "
                f"{list(local)}; state boxes that fill it, stacked along dim {self.dim}"
            )
        return tuple(boxes)


class LocalLayout(NamedTuple):
    """The manifest of a rank, and its local tensors by the manifest's names."""

    manifest: Manifest
    tensors: dict[str, torch.Tensor]


def named_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a module or mapping by name: tied tensors under each name, persistent buffers included.

    Raises:
        DeclarationError: if ``model`` is neither a module nor a mapping of names to tensors.
    """
    if isinstance(model, torch.nn.Module):
        tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        kept = set(model.state_dict(keep_vars=True)) if any(True for _ in model.buffers()) else set[str]()
        buffers = model.named_buffers(remove_duplicate=False)
        tensors.update((name, buffer) for name, buffer in buffers if name in kept)
        return tensors
    if not isinstance(model, Mapping):
        raise DeclarationError(
            f"weights are an nn.Module or a mapping of names to tensors, not {type(model).__name__}"
        )
    wrong = {
        str(name): type(value).__name__
        for name, value in model.items()
        if not isinstance(value, torch.Tensor)
    }
    if wrong:
        raise DeclarationError(f"weights are a mapping of names to tensors, but {wrong} are no tensors")
    return dict(model)


def read_tensors(model: Any, boxes: Mapping[str, ShardSpec] | None = None) -> LocalLayout:
    """Read plain, replicated and distributed tensors. Two names of a storage become a tie.

    Args:
        model: a module, or tensors by name. A plain tensor is complete: all ranks hold the same.
        boxes: stated layouts by name.

    Raises:
        DeclarationError: if a tensor cannot be read; the message names it.
    """
    stated = dict(boxes or {})
    tensors = named_tensors(model)
    unknown = sorted(stated.keys() - tensors.keys())
    if unknown:
        raise DeclarationError(
            f"boxes= names tensors that do not exist: {', '.join(unknown[:5])}; expected some of "
            f"{', '.join(sorted(tensors)[:5])}, ..."
        )
    held = {name: _hold(name, tensor, stated.get(name)) for name, tensor in tensors.items()}
    return make_layout(tensors, held)


def make_layout(tensors: Mapping[str, torch.Tensor], held: Mapping[str, HeldTensor]) -> LocalLayout:
    """Return the layout of local tensors, with ties found by their storage."""
    local = {name: local_of(tensor) for name, tensor in tensors.items()}
    first: dict[tuple[Any, ...], str] = {}
    ties: dict[str, str] = {}
    for name, tensor in local.items():
        if tensor.numel() and not tensor.is_meta:
            storage = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), held[name])
            twin = first.setdefault(storage, name)
            if twin != name:
                ties[name] = twin
    own = {name: layout for name, layout in held.items() if name not in ties}
    return LocalLayout(Manifest.of(own, ties), {name: tensor.detach() for name, tensor in local.items()})


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rank's own part, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held_as(name: str, tensor: torch.Tensor, shape: tuple[int, ...], boxes: Iterable[LocalBox]) -> HeldTensor:
    """Return the layout of a tensor, without empty boxes.

    Raises:
        DeclarationError: if its type cannot be sent.
    """
    dtype = name_of(tensor.dtype)
    if dtype not in DTYPE_BYTES:
        raise DeclarationError(f"{name} has type {dtype}; weights can be {', '.join(DTYPE_BYTES)}")
    return HeldTensor(dtype, tuple(shape), tuple(local for local in boxes if volume(local.box)))


def _hold(name: str, tensor: torch.Tensor, stated: ShardSpec | None) -> HeldTensor:
    if stated is not None:
        local = tuple(local_of(tensor).shape)
        return held_as(name, tensor, stated.shape, stated.local_boxes(name, local))
    shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        return held_as(name, tensor, shape, dtensor_boxes(name, tensor))
    return held_as(name, tensor, shape, [LocalBox(whole(shape), (0,) * len(shape))])


class MeshCut(NamedTuple):
    """A mesh axis that cuts a tensor dimension: this rank has part ``part`` of ``parts``.

    ``factor`` is the split factor of a strided shard: the number of parts that a later axis cuts first. It is 1 for a
    plain shard.
    """

    dim: int
    part: int
    parts: int
    factor: int = 1


def dtensor_boxes(name: str, tensor: DTensor) -> tuple[LocalBox, ...]:
    """Return the boxes of ``tensor`` on this rank; none if the rank is outside of the mesh.

    Raises:
        DeclarationError: if a placement is Partial or unknown, or placements and local tensor contradict each other.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    axes = zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True)
    cuts = [_mesh_cut(name, *axis) for axis in axes if not isinstance(axis[2], Replicate)]
    return placed_boxes(name, tuple(tensor.shape), cuts, tuple(tensor.to_local().shape))


def _mesh_cut(name: str, index: int, count: int, placement: Any) -> MeshCut:
    if isinstance(placement, Shard) or type(placement).__name__ == "_StridedShard":
        return MeshCut(placement.dim, index, count, getattr(placement, "split_factor", 1))
    raise DeclarationError(
        f"{name} is placed as {placement}; weights can be published if placements are Shard and Replicate: "
        "redistribute it first"
    )


def placed_boxes(
    name: str, shape: Sequence[int], cuts: Sequence[MeshCut], local: Sequence[int]
) -> tuple[LocalBox, ...]:
    """Return the boxes that ``cuts``, in the order of the mesh axes, leave of a tensor of ``shape``.

    A strided shard means that a later axis cuts first: FSDP over tensor parallelism. If this does not lead to the
    ``local`` shape, the placement is read literally, as chunks within chunks.

    Raises:
        DeclarationError: if neither leads to the local shape.
    """
    for order in (_reordered, list):
        runs = [
            _apply(order([cut for cut in cuts if cut.dim == dim]), size) for dim, size in enumerate(shape)
        ]
        sizes = [sum(length for _, length in dim) for dim in runs]
        if math.prod(sizes) == 0 and math.prod(local) == 0:
            return ()
        if sizes == list(local):
            return local_boxes(runs)
    placed = ", ".join(f"dim {cut.dim}: part {cut.part} of {cut.parts}" for cut in cuts)
    raise DeclarationError(
        f"{name}: its placements ({placed}) of global shape {list(shape)} do not lead to the local shape {list(local)} "
        "of this rank; state its boxes instead"
    )


def _reordered(cuts: Sequence[MeshCut]) -> list[MeshCut]:
    """Return the cuts with each strided shard behind the axes that it strides over."""
    order: list[MeshCut] = []
    for position in reversed(range(len(cuts))):
        cut = cuts[position]
        if cut.factor > 1 and cut.factor == math.prod(other.parts for other in cuts[position + 1 :]):
            order.append(cut._replace(factor=1))
        else:
            order.insert(0, cut)
    return order


def _apply(cuts: Iterable[MeshCut], size: int) -> list[Run]:
    runs: list[Run] = [(0, size)] if size else []
    for cut in cuts:
        if cut.factor > 1:
            runs = strided_chunk(runs, cut.part, cut.parts, cut.factor)
        else:
            runs = chunk(runs, cut.part, cut.parts)
    return runs
