"""Pieces of local tensors: the only place where a plan meets memory. Also a whole sync within one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from phalanx.errors import InternalError
from phalanx.weights.planning.buckets import Slot
from phalanx.weights.planning.resharding_plan import Plan

__all__ = ["Watch", "cut", "dtype_named", "echo", "name_of", "read_slot", "run_in_process", "write_slot"]

Tensors = Mapping[str, torch.Tensor]
"""Local tensors of one rank by name, as a reader gives them beside the manifest."""


def dtype_named(name: str) -> torch.dtype:
    """``torch.bfloat16`` of "bfloat16"."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise InternalError(f"a plan names the type {name}, which torch {torch.__version__} does not have")
    return found


def name_of(dtype: torch.dtype) -> str:
    """ "bfloat16" of ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def cut(tensor: torch.Tensor, at: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The part of ``tensor`` that begins at ``at``, as a view."""
    found = tensor.detach()
    for dim, (start, size) in enumerate(zip(at, sizes, strict=True)):
        if size != found.shape[dim]:
            found = found.narrow(dim, start, size)
    return found


def read_slot(tensors: Tensors, slot: Slot) -> torch.Tensor:
    """What the source sends in ``slot``: a view, of the source's type; the copy into the bucket casts."""
    return cut(tensors[slot.source_name], slot.source_at, slot.sizes)


def write_slot(tensors: Tensors, slot: Slot) -> torch.Tensor:
    """Where what arrives in ``slot`` belongs: a view of the target's parameter."""
    return cut(tensors[slot.target_name], slot.target_at, slot.sizes)


class Watch:
    """Tells whether tensors were written to since it was made, by the counters that torch keeps of in-place changes.

    Made before the source sends and asked afterwards: what changed in between travelled half old, half new. A write
    through ``tensor.data`` or into the memory from elsewhere does not count, nor one to a tensor of inference mode;
    digests find those.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._seen = {
            name: (tensor, tensor._version) for name, tensor in tensors.items() if not tensor.is_inference()
        }

    def written(self) -> list[str]:
        """Names of the tensors that were."""
        return sorted(name for name, (tensor, seen) in self._seen.items() if tensor._version != seen)


def echo(plan: Plan, tensors: Tensors) -> None:
    """Copy what travelled once to the names that are tied to it at the source, but not here."""
    with torch.no_grad():
        for name, twin in plan.echoes:
            if name in tensors and twin in tensors:
                tensors[twin].detach().copy_(tensors[name])


def run_in_process(plan: Plan, sources: Sequence[Tensors], targets: Sequence[Tensors]) -> int:
    """Do all of ``plan`` on tensors of this process, piece by piece without a buffer.

    Args:
        sources, targets: local tensors by rank, then by name.

    Returns:
        Bytes written.
    """
    moved = 0
    with torch.no_grad():
        for lane, pair, piece in plan.moves():
            given = cut(sources[piece.source][pair.source], piece.source_at, piece.box.sizes)
            for target in piece.targets:
                cut(targets[target][pair.target], piece.target_at, piece.box.sizes).copy_(given)
                moved += lane.nbytes(piece)
    for tensors in targets:
        echo(plan, tensors)
    return moved
