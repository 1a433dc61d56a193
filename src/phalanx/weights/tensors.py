"""Local tensors of a rank: their types and devices, parts, comparisons and tied names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from phalanx.weights.plan import Plan

Tensors = Mapping[str, torch.Tensor]
"""Local tensors of a rank by name."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types that numpy has too, by bytes per element."""


def dtype_named(name: str) -> torch.dtype:
    """Return ``torch.bfloat16`` for "bfloat16"."""
    return getattr(torch, name)


def name_of(dtype: torch.dtype) -> str:
    """Return "bfloat16" for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def cut(tensor: torch.Tensor, at: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return the part of ``tensor`` that begins at ``at``, as a view."""
    part = tensor.detach()
    for dim, (start, size) in enumerate(zip(at, sizes, strict=True)):
        if size != part.shape[dim]:
            part = part.narrow(dim, start, size)
    return part


def device_of(tensors: Tensors) -> torch.device:
    """Return the CUDA device that has all tensors with elements; the CPU if no single device has them all."""
    devices = {tensor.device for tensor in tensors.values() if tensor.numel()}
    return devices.pop() if [device.type for device in devices] == ["cuda"] else torch.device("cpu")


def odd_tensors(tensors: Tensors, like: Tensors) -> list[str]:
    """Return the names in ``like`` whose tensors are missing, or have another shape or type."""
    return [
        name
        for name, wanted in like.items()
        if name not in tensors or tensors[name].shape != wanted.shape or tensors[name].dtype != wanted.dtype
    ]


def is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have equal values, at once if they have the same memory."""
    return first.data_ptr() == second.data_ptr() or torch.equal(first, second)


def copy_ties(plan: Plan, tensors: Tensors) -> None:
    """Copy each tensor to the names that are tied to it at the source, but not at this target."""
    with torch.no_grad():
        for name, twin in plan.copies:
            if name in tensors and twin in tensors:
                tensors[twin].detach().copy_(tensors[name])
