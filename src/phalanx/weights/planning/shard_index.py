"""All manifests of one side read together: who holds which name, with names that are held alike as one form."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from phalanx.weights.planning.boxes import Patch, meet, volume, whole
from phalanx.weights.planning.layout_mismatch import Fault
from phalanx.weights.planning.shard_manifest import Held, Manifest
from phalanx.weights.planning.tensor_names import Names

__all__ = ["Form", "ShardIndex", "take_census"]


class Form(NamedTuple):
    """How a group holds a tensor: its type, its global shape, and (rank, boxes) for each rank that has some."""

    dtype: str
    shape: tuple[int, ...]
    holders: tuple[tuple[int, tuple[Patch, ...]], ...]


class ShardIndex(NamedTuple):
    """One side of a sync. ``forms[name]`` is an index into ``table``; ``ties`` maps a name to the one it is."""

    forms: dict[str, int]
    table: list[Form]
    ties: dict[str, str]

    def form(self, name: str) -> Form:
        """How ``name`` is held."""
        return self.table[self.forms[name]]


def take_census(manifests: Sequence[Manifest], side: str, faults: list[Fault]) -> ShardIndex:
    """Read ``manifests`` of the ranks 0..n-1 together; what does not fit within the side goes to ``faults``.

    Ranks that hold the same set of names in one form list an equal ``Names``, so the cost is that of the distinct
    sets and not names times ranks.
    """
    holders: dict[Names, list[tuple[int, Held]]] = defaultdict(list)
    for rank, manifest in enumerate(manifests):
        for held, names in manifest.groups:
            holders[names].append((rank, held))
    sets = list(holders)
    member: dict[str, tuple[int, ...]] = {}
    for index, names in enumerate(sets):
        for name in names:
            member[name] = (*member.get(name, ()), index)
    known: dict[tuple[int, ...], int] = {}
    table: list[Form] = []
    forms: dict[str, int] = {}
    for name, key in member.items():
        index = known.get(key)
        if index is None:
            index = known[key] = len(table)
            table.append(_form(name, [one for i in key for one in holders[sets[i]]], side, faults))
        forms[name] = index
    ties = {alias: name for manifest in manifests for alias, name in manifest.ties}
    return ShardIndex(forms, table, ties)


def _form(name: str, held: list[tuple[int, Held]], side: str, faults: list[Fault]) -> Form:
    held = sorted(held, key=lambda one: one[0])
    first_rank, first = held[0]
    for rank, form in held[1:]:
        if (form.dtype, form.shape) != (first.dtype, first.shape):
            wanted = f"{first.dtype} {list(first.shape)} as on rank {first_rank}"
            faults.append(Fault(name, wanted, f"{form.dtype} {list(form.shape)}", f"{side} rank {rank}"))
    for rank, form in held:
        _check(name, form, f"{side} rank {rank}", faults)
    return Form(first.dtype, first.shape, tuple((rank, form.patches) for rank, form in held if form.patches))


def _check(name: str, held: Held, where: str, faults: list[Fault]) -> None:
    """Boxes of one rank lie within the tensor and do not overlap."""
    everything = whole(held.shape)
    for patch in held.patches:
        inside = len(patch.box.sizes) == len(held.shape) and meet(patch.box, everything) == patch.box
        if not inside and volume(patch.box):
            faults.append(Fault(name, f"boxes within {list(held.shape)}", str(patch.box), where))
            return
    if sum(volume(patch.box) for patch in held.patches) <= max(
        (volume(patch.box) for patch in held.patches), default=0
    ):
        return
    ordered = sorted(patch.box for patch in held.patches)
    for index, box in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if box.offsets and other.offsets[0] >= box.offsets[0] + box.sizes[0]:
                break
            if meet(box, other):
                faults.append(
                    Fault(name, "boxes that do not overlap", f"{box} and {other}, an overlap", where)
                )
                return
