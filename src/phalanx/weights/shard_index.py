"""The shard index of a side of a sync: the manifests of all its ranks, read together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from phalanx.display.tables import Table
from phalanx.errors import WeightsMismatch
from phalanx.weights.boxes import LocalBox, meet, volume, whole
from phalanx.weights.manifest import HeldTensor, Manifest, Names

_SHOWN_FAULTS = 30


class LayoutFault(NamedTuple):
    """A mismatch: the tensor, the wanted and the found layout, and the rank."""

    name: str
    wanted: str
    found: str
    rank: str


def refuse(faults: Sequence[LayoutFault]) -> None:
    """Raise all ``faults`` as a single error, if there are any.

    Raises:
        WeightsMismatch: ``rows`` has all faults, the message has the first of them as a table.
    """
    if not faults:
        return
    rows: tuple[LayoutFault, ...] = tuple(dict.fromkeys(faults))
    notes = [f"... and {len(rows) - _SHOWN_FAULTS} more"] if len(rows) > _SHOWN_FAULTS else []
    notes.append(
        "Nothing was moved. Let both sides name the same tensors (rename=, fused=), with the same global shapes, "
        "and boxes that together cover them."
    )
    title = f"{len(rows)} of the weights' tensors do not fit"
    table = Table(title, ("name", "wanted", "found", "rank"), rows[:_SHOWN_FAULTS], tuple(notes))
    error = WeightsMismatch(str(table))
    error.rows = rows
    raise error


class TensorLayout(NamedTuple):
    """The layout of a tensor on a group: type, global shape, and (rank, boxes) of each rank that has a part."""

    dtype: str
    shape: tuple[int, ...]
    holders: tuple[tuple[int, tuple[LocalBox, ...]], ...]

    def __str__(self) -> str:
        """Return type and shape."""
        return f"{self.dtype} {list(self.shape)}"


class ShardIndex(NamedTuple):
    """One side of a sync. ``layouts[name]`` is an index into ``table``; ``ties`` maps a name to its storage's name."""

    layouts: dict[str, int]
    table: list[TensorLayout]
    ties: dict[str, str]

    def layout(self, name: str) -> TensorLayout:
        """Return the layout of ``name``."""
        return self.table[self.layouts[name]]


def make_index(manifests: Sequence[Manifest], side: str, faults: list[LayoutFault]) -> ShardIndex:
    """Read the manifests of the ranks 0..n-1 together. Contradictions within the side go to ``faults``.

    Ranks that hold the same set of names in a layout list equal ``Names``. The cost therefore depends on the number
    of distinct sets, not on names times ranks.
    """
    holders: dict[Names, list[tuple[int, HeldTensor]]] = defaultdict(list)
    for rank, manifest in enumerate(manifests):
        for tensor, names in manifest.groups:
            holders[names].append((rank, tensor))
    sets = list(holders)
    member: dict[str, tuple[int, ...]] = {}
    for index, names in enumerate(sets):
        for name in names:
            member[name] = (*member.get(name, ()), index)
    known: dict[tuple[int, ...], int] = {}
    table: list[TensorLayout] = []
    layouts: dict[str, int] = {}
    for name, key in member.items():
        if key not in known:
            known[key] = len(table)
            held = sorted((pair for index in key for pair in holders[sets[index]]), key=lambda pair: pair[0])
            table.append(_merge_layouts(name, held, side, faults))
        layouts[name] = known[key]
    ties = {alias: name for manifest in manifests for alias, name in manifest.ties}
    return ShardIndex(layouts, table, ties)


def _merge_layouts(
    name: str, held: list[tuple[int, HeldTensor]], side: str, faults: list[LayoutFault]
) -> TensorLayout:
    first_rank, first = held[0]
    for rank, tensor in held:
        where = f"{side} rank {rank}"
        if (tensor.dtype, tensor.shape) != (first.dtype, first.shape):
            wanted = f"{first.dtype} {list(first.shape)} as on rank {first_rank}"
            faults.append(LayoutFault(name, wanted, f"{tensor.dtype} {list(tensor.shape)}", where))
        fault = _box_fault(name, tensor, where)
        if fault is not None:
            faults.append(fault)
    return TensorLayout(
        first.dtype, first.shape, tuple((rank, tensor.boxes) for rank, tensor in held if tensor.boxes)
    )


def _box_fault(name: str, tensor: HeldTensor, where: str) -> LayoutFault | None:
    """Return a fault if boxes of a rank are outside of the tensor or overlap."""
    everything = whole(tensor.shape)
    for box, _ in tensor.boxes:
        inside = len(box.sizes) == len(tensor.shape) and meet(box, everything) == box
        if not inside and volume(box):
            return LayoutFault(name, f"boxes within {list(tensor.shape)}", str(box), where)
    ordered = sorted(box for box, _ in tensor.boxes)
    for index, box in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if box.offsets and other.offsets[0] >= box.offsets[0] + box.sizes[0]:
                break
            if meet(box, other):
                found = f"{box} and {other}, an overlap"
                return LayoutFault(name, "boxes that do not overlap", found, where)
    return None
