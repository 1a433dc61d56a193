"""Manifests: names, types, global shapes and boxes of the tensors that a rank, or a group of ranks, holds.

A manifest has no values. Tensors of equal layout are listed together, so that a plan is made once for all of them.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from phalanx.collect.message import rank_list
from phalanx.display.tables import Table
from phalanx.errors import WeightsMismatch
from phalanx.weights.boxes import BoxIndex, LocalBox, meet, volume, whole
from phalanx.wire.value import Dims

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""The types between which values may be cast, without ``torch.``."""

_INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "bool")
_DTYPES = (*FLOATS, "float8_e4m3fn", "float8_e5m2", "complex64", *_INTEGERS)
DTYPE_BYTES = {name: getattr(torch, name).itemsize for name in _DTYPES}
"""Bytes per element, by the name of the type."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types that numpy has too, by bytes per element."""

Tensors = Mapping[str, torch.Tensor]
"""Local tensors of a rank by name."""

_SHOWN_FAULTS = 30


def dtype_named(name: str) -> torch.dtype:
    """Return ``torch.bfloat16`` for "bfloat16"."""
    return getattr(torch, name)


def name_of(dtype: torch.dtype) -> str:
    """Return "bfloat16" for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def bits_of(tensor: torch.Tensor) -> Any:
    """Return the bits of a tensor as a flat array: its own memory if it is contiguous on the host, else a copy."""
    plain = tensor.resolve_conj().resolve_neg()
    flat = (torch.view_as_real(plain) if plain.is_complex() else plain).cpu().contiguous().reshape(-1)
    return flat.view(INTEGERS[flat.element_size()]).numpy()


def pack_names(names: Iterable[str]) -> bytes:
    """Compress names, which have no null characters: a model of many experts has tens of thousands of names."""
    return zlib.compress("\0".join(names).encode())


def unpack_names(packed: bytes) -> list[str]:
    """Return the names that :func:`pack_names` compressed, in their order."""
    return zlib.decompress(packed).decode().split("\0")


@dataclass(frozen=True)
class HeldTensor:
    """The layout of a tensor on a rank: type, global shape and local boxes (none on an empty rank)."""

    dtype: str
    shape: Dims
    boxes: tuple[LocalBox, ...]


@dataclass(frozen=True)
class Manifest:
    """All tensors of a rank. Ranks that hold equal boxes of a name are replicas.

    Attributes:
        groups: layouts, each with the packed names of its tensors.
        ties: (name, name that stands for both) of names that share a storage.
    """

    groups: tuple[tuple[HeldTensor, bytes], ...]
    ties: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, tensors: Mapping[str, HeldTensor], ties: Mapping[str, str] = {}) -> Manifest:
        """Return the manifest of tensors by name; ``ties`` maps names of a storage to the name that stands for it."""
        by_layout: dict[HeldTensor, list[str]] = defaultdict(list)
        for name, tensor in tensors.items():
            if name not in ties:
                by_layout[tensor].append(name)
        groups = tuple((tensor, pack_names(names)) for tensor, names in by_layout.items())
        return cls(groups, tuple(sorted(ties.items())))

    def items(self) -> Iterator[tuple[str, HeldTensor]]:
        """Yield every name with its layout, except for the names of ``ties``."""
        for tensor, names in self.groups:
            for name in unpack_names(names):
                yield name, tensor


class LayoutFault(NamedTuple):
    """A mismatch: the tensor, the wanted and the found layout, and the rank."""

    name: str
    wanted: str
    found: str
    rank: str


def refuse(faults: Sequence[LayoutFault]) -> None:
    """Raise all ``faults`` as a single error, if there are any.

    Raises:
        WeightsMismatch: if there are faults. ``rows`` has all of them, the message is a table of the first 30.
    """
    if not faults:
        return
    rows: tuple[LayoutFault, ...] = tuple(dict.fromkeys(faults))
    notes = [f"... and {len(rows) - _SHOWN_FAULTS} more"] if len(rows) > _SHOWN_FAULTS else []
    notes.append(
        "Nothing was transferred. Make both sides name the same tensors (rename=, fused=), with the same global "
        "shapes, and boxes that together cover them."
    )
    title = f"{len(rows)} tensors do not fit"
    table = Table(title, ("name", "wanted", "found", "rank"), rows[:_SHOWN_FAULTS], tuple(notes))
    error = WeightsMismatch(str(table))
    error.rows = rows
    raise error


@dataclass(frozen=True, eq=False)
class TensorLayout:
    """The layout of a tensor on a group. Tensors of equal layout share the object: layouts are compared by identity.

    Attributes:
        holders: (rank, boxes) of each rank that has a part.
    """

    dtype: str
    shape: Dims
    holders: tuple[tuple[int, tuple[LocalBox, ...]], ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    @property
    def holder_names(self) -> str:
        """The ranks that have a part, as text."""
        return rank_list(rank for rank, _ in self.holders)


class GroupManifest(NamedTuple):
    """The tensors of a side of a sync: layouts by name, and the name of its storage for each tied name."""

    layouts: dict[str, TensorLayout]
    ties: dict[str, str]


def merge_manifests(manifests: Sequence[Manifest], side: str, faults: list[LayoutFault]) -> GroupManifest:
    """Merge the manifests of the ranks 0..n-1 of a side. Contradictions between ranks are added to ``faults``.

    Ranks that hold the same names in a layout list equal packed names. The cost therefore depends on the number of
    distinct lists, not on names times ranks.
    """
    holders: dict[bytes, list[tuple[int, HeldTensor]]] = defaultdict(list)
    for rank, manifest in enumerate(manifests):
        for tensor, names in manifest.groups:
            holders[names].append((rank, tensor))
    lists_of: dict[str, tuple[bytes, ...]] = {}
    for names in holders:
        for name in unpack_names(names):
            lists_of[name] = (*lists_of.get(name, ()), names)
    merged: dict[tuple[bytes, ...], TensorLayout] = {}
    layouts: dict[str, TensorLayout] = {}
    for name, lists in lists_of.items():
        if lists not in merged:
            held = sorted((pair for names in lists for pair in holders[names]), key=lambda pair: pair[0])
            merged[lists] = _merge_layouts(name, held, side, faults)
        layouts[name] = merged[lists]
    return GroupManifest(layouts, {alias: name for manifest in manifests for alias, name in manifest.ties})


def _merge_layouts(
    name: str, held: list[tuple[int, HeldTensor]], side: str, faults: list[LayoutFault]
) -> TensorLayout:
    first_rank, first = held[0]
    layout = TensorLayout(
        first.dtype,
        first.shape,
        tuple((rank, one.boxes) for rank, one in held if one.boxes and len(one.shape) == len(first.shape)),
    )
    for rank, tensor in held:
        where = f"{side} rank {rank}"
        if (tensor.dtype, tensor.shape) != (first.dtype, first.shape):
            found = f"{tensor.dtype} {list(tensor.shape)}"
            faults.append(LayoutFault(name, f"{layout} as on rank {first_rank}", found, where))
        faults += [LayoutFault(name, *fault, where) for fault in _box_faults(tensor)]
    return layout


def _box_faults(tensor: HeldTensor) -> Iterator[tuple[str, str]]:
    """Yield the wanted and the found layout if boxes of a rank are outside of the tensor or overlap."""
    everything, boxes = whole(tensor.shape), [box for box, _ in tensor.boxes]
    for box in boxes:
        inside = len(box.sizes) == len(tensor.shape) and meet(box, everything) == box
        if not inside and volume(box):
            yield f"boxes within {list(tensor.shape)}", str(box)
            return
    overlap = BoxIndex(boxes).overlap()
    if overlap is not None:
        yield "boxes that do not overlap", f"{overlap[0]} and {overlap[1]}, an overlap"
