"""From a mapping of names to tensors to what this rank holds of them: the reader that finds out which reader fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from phalanx.errors import DeclarationError
from phalanx.weights.planning.boxes import Box, Patch, volume, whole
from phalanx.weights.planning.readers.dtensor import dtensor_patches
from phalanx.weights.planning.shard_manifest import DTYPE_BYTES, Held, Manifest
from phalanx.weights.planning.tensors import name_of

__all__ = ["Reading", "ShardSpec", "named_tensors", "read_tensors"]


@dataclass(frozen=True)
class ShardSpec:
    """What a user states of a tensor that no reader knows: its global shape and the boxes that are here.

    Args:
        shape: of the global tensor.
        boxes: (offsets, sizes) of each box. One box is the whole local tensor; several lie one after another
            along ``dim`` of it.
        dim: along which several boxes are stacked in the local tensor.
    """

    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    dim: int = 0

    def patches(self, name: str, local: tuple[int, ...]) -> tuple[Patch, ...]:
        """The boxes with their places in a local tensor of shape ``local``.

        Raises:
            DeclarationError: the boxes are not of the local tensor's size.
        """
        found: list[Patch] = []
        at = 0
        for offsets, sizes in self.boxes:
            place = tuple(at if dim == self.dim else 0 for dim in range(len(sizes)))
            found.append(Patch(Box(tuple(offsets), tuple(sizes)), place))
            at += sizes[self.dim] if sizes else 0
        if found:
            size = found[0].box.sizes
            stacked = tuple(at if dim == self.dim else length for dim, length in enumerate(size))
            same = all(
                _less(patch.box.sizes, self.dim) == _less(size, self.dim) for patch in found
            ) and stacked == tuple(local)
        else:
            same = 0 in local
        if not same:
            raise DeclarationError(
                f"{name}: the stated boxes {[str(patch.box) for patch in found]} do not make up the local tensor of "
                f"shape {list(local)}; state boxes that fill it, stacked along dim {self.dim}"
            )
        return tuple(found)


def _less(sizes: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return tuple(size for index, size in enumerate(sizes) if index != dim)


class Reading(NamedTuple):
    """What a rank holds: the manifest to send around, and the local tensors, by the manifest's names, that stay."""

    manifest: Manifest
    tensors: dict[str, torch.Tensor]


def named_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a module by name, tied ones under each name, persistent buffers included; or of a mapping.

    Raises:
        DeclarationError: it is neither, or a value is no tensor.
    """
    if isinstance(model, torch.nn.Module):
        found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        kept = set(model.state_dict(keep_vars=True)) if any(True for _ in model.buffers()) else set[str]()
        found.update((name, one) for name, one in model.named_buffers(remove_duplicate=False) if name in kept)
        return found
    if isinstance(model, Mapping):
        wrong = {str(name): type(value).__name__ for name, value in model.items() if not _is_tensor(value)}
        if not wrong:
            return dict(model)
        raise DeclarationError(f"weights are a mapping of names to tensors, but {wrong} are none")
    raise DeclarationError(
        f"weights are an nn.Module or a mapping of names to tensors, not {type(model).__name__}"
    )


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def read_tensors(model: Any, boxes: Mapping[str, ShardSpec] | None = None) -> Reading:
    """Read plain, replicated and distributed tensors; two names of one storage become a tie.

    Args:
        model: a module, or tensors by name. A plain tensor is whole: held by all ranks alike.
        boxes: what the user states of some names, instead.

    Raises:
        DeclarationError: a tensor cannot be read; the message names it.
    """
    stated = dict(boxes or {})
    tensors = named_tensors(model)
    unknown = sorted(stated.keys() - tensors.keys())
    if unknown:
        raise DeclarationError(
            f"boxes are stated for {', '.join(unknown[:5])}, of which there are no tensors; known are "
            f"{', '.join(sorted(tensors)[:5])}, ..."
        )
    held = {name: _held(name, tensor, stated.get(name)) for name, tensor in tensors.items()}
    return gather_reading(tensors, held)


def gather_reading(tensors: Mapping[str, torch.Tensor], held: Mapping[str, Held]) -> Reading:
    """Put what is held and the local tensors together, with ties found by their storage."""
    local = {name: local_of(tensor) for name, tensor in tensors.items()}
    ties = dict(_ties(local, held))
    own = {name: form for name, form in held.items() if name not in ties}
    return Reading(Manifest.of(own, ties), {name: one.detach() for name, one in local.items()})


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The rank's own part, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _ties(local: Mapping[str, torch.Tensor], held: Mapping[str, Held]) -> Iterable[tuple[str, str]]:
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in local.items():
        if tensor.numel() == 0 or tensor.is_meta:
            continue
        form = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), held[name])
        known = first.setdefault(form, name)
        if known != name:
            yield name, known


def held_as(name: str, tensor: torch.Tensor, shape: tuple[int, ...], patches: Iterable[Patch]) -> Held:
    """A :class:`Held` of a tensor's type, without empty boxes.

    Raises:
        DeclarationError: its type cannot be sent.
    """
    dtype = name_of(tensor.dtype)
    if dtype not in DTYPE_BYTES:
        raise DeclarationError(f"{name} has type {dtype}; weights can be {', '.join(DTYPE_BYTES)}")
    return Held(dtype, tuple(shape), tuple(patch for patch in patches if volume(patch.box)))


def _held(name: str, tensor: torch.Tensor, stated: ShardSpec | None) -> Held:
    if stated is not None:
        return held_as(name, tensor, stated.shape, stated.patches(name, tuple(local_of(tensor).shape)))
    shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        return held_as(name, tensor, shape, dtensor_patches(name, tensor))
    return held_as(name, tensor, shape, [Patch(whole(shape), (0,) * len(shape))])
