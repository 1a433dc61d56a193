"""Boxes of a DTensor, read from mesh and placements by arithmetic and compared with what the rank really has.

Torch's own function for this (`compute_local_shape_and_global_offset`, which DCP uses too) is wrong, without a word,
for uneven dims under FSDP over tensor parallelism where a rank's chunk is missing, and for strided shards without the
shard that they stride over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch.distributed.tensor import DTensor, Replicate, Shard

from phalanx.errors import DeclarationError
from phalanx.weights.planning.boxes import Patch, Run, chunk, patches_of, strided_chunk

__all__ = ["Cut", "dtensor_patches", "placed_patches"]


class Cut(NamedTuple):
    """One mesh axis that cuts a tensor dim: this rank has part ``part`` of ``parts``.

    ``factor`` is the split factor of a strided shard: how many parts a later axis cuts first; 1 for a plain one.
    """

    dim: int
    part: int
    parts: int
    factor: int = 1


def dtensor_patches(name: str, tensor: DTensor) -> tuple[Patch, ...]:
    """The boxes of ``tensor`` that this rank has; none where it is outside of the mesh.

    Raises:
        DeclarationError: a placement is Partial or unknown, or placements and the local tensor contradict.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    axes = zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True)
    cuts = [cut for index, count, placement in axes if (cut := _cut(name, index, count, placement))]
    return placed_patches(name, tuple(tensor.shape), cuts, tuple(tensor.to_local().shape))


def _cut(name: str, index: int, count: int, placement: Any) -> Cut | None:
    if isinstance(placement, Replicate):
        return None
    factor = getattr(placement, "split_factor", 1)
    if isinstance(placement, Shard) or type(placement).__name__ == "_StridedShard":
        return Cut(placement.dim, index, count, factor)
    raise DeclarationError(
        f"{name} is placed as {placement}; weights can be published where placements are Shard and Replicate: "
        "redistribute it first"
    )


def placed_patches(
    name: str, shape: Sequence[int], cuts: Sequence[Cut], local: Sequence[int]
) -> tuple[Patch, ...]:
    """The boxes that ``cuts``, in the order of the mesh axes, leave of a tensor of ``shape``.

    A strided shard means that a later axis cut first, and that is the order in which FSDP makes it; only where that
    does not give the ``local`` shape is the placement taken by the letter, as chunks within chunks.

    Raises:
        DeclarationError: neither gives it.
    """
    for order in (_in_true_order, _by_the_letter):
        runs = [order([cut for cut in cuts if cut.dim == dim], size) for dim, size in enumerate(shape)]
        sizes = [sum(length for _, length in dim) for dim in runs]
        if math.prod(sizes) == 0 and math.prod(local) == 0:
            return ()
        if sizes == list(local):
            return patches_of(runs)
    told = ", ".join(f"dim {cut.dim}: part {cut.part} of {cut.parts}" for cut in cuts)
    raise DeclarationError(
        f"{name}: its placements ({told}) of global shape {list(shape)} do not lead to the local shape {list(local)} "
        "that this rank has; state its boxes instead"
    )


def _in_true_order(cuts: Sequence[Cut], size: int) -> list[Run]:
    """Axes that a strided shard strides over cut before it does."""
    order: list[Cut] = []
    for position in reversed(range(len(cuts))):
        cut = cuts[position]
        later = math.prod(other.parts for other in cuts[position + 1 :])
        if cut.factor > 1 and cut.factor == later:
            order.append(cut._replace(factor=1))
        else:
            order.insert(0, cut)
    return _apply(order, size)


def _by_the_letter(cuts: Sequence[Cut], size: int) -> list[Run]:
    return _apply(cuts, size)


def _apply(cuts: Iterable[Cut], size: int) -> list[Run]:
    runs: list[Run] = [(0, size)] if size else []
    for cut in cuts:
        if cut.factor > 1:
            runs = strided_chunk(runs, cut.part, cut.parts, cut.factor)
        else:
            runs = chunk(runs, cut.part, cut.parts)
    return runs
