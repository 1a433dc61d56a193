"""The resharding plan of a sync: which box of which tensor goes from which source rank to which target ranks. Pure.

``make_plan`` merges the manifests of each side (``merge_manifests``), matches names (``NameMatch``), finds the source
boxes of each target box (``find_overlaps``, once for all tensors of equal layout), and chooses the replica that sends
each of them (``choose_senders``). All faults are raised as a single error.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import product
from operator import add, sub
from typing import Literal, NamedTuple

from phalanx.display.tables import Table
from phalanx.display.text_format import first_of, size
from phalanx.weights.boxes import Box, BoxIndex, LocalBox, meet, volume
from phalanx.weights.manifest import DTYPE_BYTES, LayoutFault, Manifest, merge_manifests, refuse
from phalanx.weights.name_matching import BUILT_IN, Fused, NameMapping, NameMatch, Pair, Rename, seen_through
from phalanx.wire.value import Dims

Side = Literal["source", "target"]
_MOST_NAMED = 4
_MOST_SHARES = 8
"""Maximum number of batches into which tensors of one layout are divided, so that replicas share the work."""


class Locality(IntEnum):
    """The distance between two ranks, nearest first. It decides the replica that is read, and the transport."""

    PROCESS = 0
    NODE = 1
    REMOTE = 2

    def __str__(self) -> str:
        return ("same process", "same node", "other node")[self]


class RankLocation(NamedTuple):
    """The place of a rank. Two ranks have the same ``node`` only if they can share memory.

    ``device`` identifies the physical CUDA device that has the rank's tensors; "" if they are in host memory.
    """

    node: str
    process: str
    device: str = ""


class Locations(NamedTuple):
    """The locations of both sides, by rank."""

    sources: tuple[RankLocation, ...]
    targets: tuple[RankLocation, ...]


class TransferBox(NamedTuple):
    """A box that is sent once from ``source`` to all of ``targets``.

    ``box`` has coordinates of the global tensor, or of the part of a fused tensor. ``source_at`` and ``target_at``
    are its positions in the local tensors.
    """

    source: int
    targets: tuple[int, ...]
    locality: Locality
    box: Box
    source_at: Dims
    target_at: Dims


@dataclass(frozen=True)
class TensorBatch:
    """Tensors with equal boxes: each of ``pairs`` is sent in ``boxes``, cast from ``source_dtype`` to ``dtype``."""

    source_dtype: str
    dtype: str
    pairs: tuple[Pair, ...]
    boxes: tuple[TransferBox, ...]

    def nbytes(self, box: TransferBox) -> int:
        """Return the bytes that are sent for ``box`` of a single pair."""
        return volume(box.box) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Plan:
    """All transfers of a sync. Equal manifests and locations lead to an equal plan.

    Attributes:
        batches: tensors and their boxes, in the order in which all ranks work.
        copies: (name, its twin) at the target. The twin is copied from the name after the transfer.
        ties: (name, name of its storage) at the target. Both arrive as a single tensor.
        surplus: names of the source that no target takes.
        targets: number of target ranks.
    """

    batches: tuple[TensorBatch, ...]
    copies: tuple[tuple[str, str], ...]
    ties: tuple[tuple[str, str], ...]
    surplus: tuple[str, ...]
    targets: int

    def part(self, wanted: Callable[[TransferBox], bool]) -> Plan:
        """Return the plan with only the boxes that are ``wanted``, in the same order."""
        batches = (replace(batch, boxes=tuple(filter(wanted, batch.boxes))) for batch in self.batches)
        return replace(self, batches=tuple(batch for batch in batches if batch.boxes))

    def of(self, side: Side, rank: int) -> Plan:
        """Return the part of the plan that concerns a rank."""
        return self.part(lambda box: rank in (box.targets if side == "target" else (box.source,)))

    def transfers(self) -> Iterator[tuple[TensorBatch, Pair, TransferBox]]:
        """Yield every box of every tensor, in the order in which all ranks work."""
        for batch in self.batches:
            for pair, box in product(batch.pairs, batch.boxes):
                yield batch, pair, box

    @property
    def boxes(self) -> list[TransferBox]:
        """The boxes, once per batch of tensors."""
        return [box for batch in self.batches for box in batch.boxes]

    @property
    def members(self) -> list[tuple[Side, int]]:
        """(side, rank) of the ranks that send or receive, in a fixed order."""
        members: set[tuple[Side, int]] = {("source", box.source) for box in self.boxes}
        members |= {("target", rank) for box in self.boxes for rank in box.targets}
        return sorted(members)

    def bytes_by_link(self) -> dict[tuple[int, int, Locality], int]:
        """Return the bytes from each source rank to each target rank, by locality."""
        links: dict[tuple[int, int, Locality], int] = defaultdict(int)
        for batch in self.batches:
            for box in batch.boxes:
                for target in box.targets:
                    links[box.source, target, box.locality] += batch.nbytes(box) * len(batch.pairs)
        return dict(sorted(links.items()))


def explain_plan(plan: Plan, transports: Mapping[Locality, str], kept: Plan, title: str) -> Table:
    """Return a table with a row for each pair of ranks, and notes.

    Args:
        transports: the transport of each locality.
        kept: the part of the plan of which sources keep a copy, for deltas.
    """
    rows: list[tuple[str, ...]] = []
    sums: dict[Locality, int] = defaultdict(int)
    for (source, target, locality), nbytes in plan.bytes_by_link().items():
        rows.append((f"rank {source}", f"rank {target}", str(locality), transports[locality], size(nbytes)))
        sums[locality] += nbytes
    casts: dict[str, set[str]] = defaultdict(set)
    for batch in plan.batches:
        if batch.source_dtype != batch.dtype:
            casts[f"{batch.source_dtype} to {batch.dtype}"] |= {pair.target for pair in batch.pairs}
    # a copy serves all readers
    copied = sum(len(batch.pairs) * batch.nbytes(box) for batch in kept.batches for box in batch.boxes)
    pairs = sorted({pair for batch in plan.batches for pair in batch.pairs})
    renamed = [f"{pair.source} -> {pair.target}" for pair in pairs if len({*pair}) > 1]
    tied = [
        *(f"{twin} = {name} (copied there)" for name, twin in plan.copies),
        *(f"{alias} = {name} (one storage there)" for alias, name in plan.ties),
    ]
    notes = {
        "by locality": ", ".join(f"{locality} {size(sums[locality])}" for locality in sorted(sums))
        or "nothing",
        "cast at the source": ", ".join(f"{kind} ({len(names)} tensors)" for kind, names in casts.items()),
        "renamed or fused": first_of(renamed, _MOST_NAMED),
        "tied, sent once": first_of(tied, _MOST_NAMED),
        "not taken by the target": first_of(plan.surplus, _MOST_NAMED),
        "deltas": f"the sources keep one more copy of what they send, {size(copied)}" if copied else "",
    }
    count = len({pair.target for pair in pairs})
    return Table(
        f"{title}: {size(sum(sums.values()))} to {plan.targets} ranks, {count} tensors",
        ("from", "to", "locality", "transport", "bytes"),
        tuple(rows),
        tuple(f"{name}: {note}" for name, note in notes.items() if note),
    )


_Holder = tuple[int, Dims]
"""Rank, and position of the box in its local tensor."""


def make_plan(
    sources: Sequence[Manifest],
    targets: Sequence[Manifest],
    locations: Locations,
    *,
    rename: Rename | None = None,
    fused: Sequence[Fused] = (),
) -> Plan:
    """Return the plan that sends every box that target ranks need once to each process or node that reads it.

    Args:
        sources, targets: manifests of both sides, in rank order.
        locations: locations of the ranks.
        rename: map from source names to target names.
        fused: rules in addition to the built-in rules.

    Raises:
        WeightsMismatch: if a name, type, shape or box of the two sides does not fit. ``rows`` has all faults.
    """
    faults: list[LayoutFault] = []
    source, target = merge_manifests(sources, "source", faults), merge_manifests(targets, "target", faults)
    match = NameMatch(source, target, rename, (*fused, *BUILT_IN), faults)
    overlaps: dict[NameMapping, list[_Overlap]] = {}
    for mapping, pairs in match.mappings.items():
        try:
            overlaps[mapping] = list(find_overlaps(mapping))
        except _Misfit as misfit:
            faults += [LayoutFault(name, *misfit.args) for _, name in pairs]
    refuse(faults)

    def weight(mapping: NameMapping) -> tuple[int, str]:
        pairs = match.mappings[mapping]
        return -math.prod(mapping.target.shape) * len(pairs), pairs[0][1]

    load = [0] * len(sources)
    batches: list[TensorBatch] = []
    for mapping in sorted(match.mappings, key=weight):  # large tensors first, so that loads become even
        pairs = match.mappings[mapping]
        dtypes = mapping.source.dtype, mapping.target.dtype
        count = min(_useful_shares(overlaps[mapping], locations), len(pairs), _MOST_SHARES)
        for index in range(count):
            share = tuple(pairs[index::count])
            nbytes = DTYPE_BYTES[dtypes[1]] * len(share)
            if boxes := choose_senders(overlaps[mapping], locations, load, nbytes):
                batches.append(TensorBatch(*dtypes, share, tuple(boxes)))
    batches.sort(key=lambda batch: (batch.pairs[0].target, batch.pairs[0].source, batch.boxes[0].box))
    ties = tuple(sorted(target.ties.items()))
    return Plan(tuple(batches), tuple(match.copies), ties, tuple(match.surplus), len(targets))


class _Misfit(Exception):
    """A mapping that does not fit. Its arguments are the wanted layout, the found layout and the rank."""


class _Overlap(NamedTuple):
    """A box of source ``holders`` that target ``ranks`` need at ``target_at`` in their tensors."""

    ranks: list[int]
    box: Box
    holders: list[_Holder]
    target_at: Dims


def find_overlaps(mapping: NameMapping) -> Iterator[_Overlap]:
    """Intersect the boxes of the source layout with the boxes that the target layout needs, seen through the views.

    Raises:
        _Misfit: if the source has a hole, or boxes that overlap in part.
    """
    holders: dict[Box, list[_Holder]] = defaultdict(list)
    for rank, boxes in mapping.source.holders:
        for box, at in seen_through(mapping.source_view, boxes):
            holders[box].append((rank, at))
    wanted: dict[LocalBox, list[int]] = defaultdict(list)
    for rank, boxes in mapping.target.holders:
        for local_box in seen_through(mapping.target_view, boxes):
            if volume(local_box.box):
                wanted[local_box].append(rank)
    index = BoxIndex(holders)
    doubled = index.overlap()
    if doubled is not None:
        ranks = f"source ranks {holders[doubled[0]][0][0]} and {holders[doubled[1]][0][0]}"
        raise _Misfit("boxes that are equal or disjoint", f"{meet(*doubled)}, an overlap", ranks)
    for (box, at), ranks in wanted.items():
        parts = list(index.meeting(box))
        if sum(volume(part) for _, part in parts) < volume(box):
            found = f"a hole: no source rank has {index.hole(box)}"
            raise _Misfit(f"{box} at a source", found, f"target rank {ranks[0]}")
        for held, part in parts:
            inside = [(rank, _shift(at, part, held)) for rank, at in holders[held]]
            yield _Overlap(ranks, part, inside, _shift(at, part, box))


def _shift(at: Dims, part: Box, box: Box) -> Dims:
    """Return the position of ``part`` in a local tensor that has ``box`` at ``at``."""
    return tuple(map(sub, map(add, at, part.offsets), box.offsets))


def _useful_shares(overlaps: Sequence[_Overlap], locations: Locations) -> int:
    """Return the number of batches into which tensors must be divided so that every replica can send some."""
    copies = max((len(overlap.holders) for overlap in overlaps), default=1)
    choices = sum(len({locations.targets[rank].node for rank in overlap.ranks}) for overlap in overlaps)
    return -(-copies // max(choices, 1))


def choose_senders(
    overlaps: Sequence[_Overlap], locations: Locations, load: list[int], nbytes: int
) -> list[TransferBox]:
    """Choose a source for every overlap: the least loaded of the nearest replicas.

    Args:
        load: bytes that each source rank sends already. It is updated.
        nbytes: bytes of an element, summed over all tensors of the batch.
    """
    transfers: list[TransferBox] = []
    for overlap in overlaps:
        _, box, holders, target_at = overlap
        readers: dict[tuple[Locality, _Holder], list[int]] = defaultdict(list)
        for ranks in _neighbors(overlap, locations):
            place = locations.targets[ranks[0]]
            distances = {holder: _distance(locations.sources[holder[0]], place) for holder in holders}
            nearest = min(distances, key=lambda holder: (distances[holder], load[holder[0]]))
            load[nearest[0]] += volume(box) * nbytes
            readers[distances[nearest], nearest] += ranks
        for (locality, (rank, at)), targets in readers.items():
            transfers.append(TransferBox(rank, tuple(sorted(targets)), locality, box, at, target_at))
    return sorted(transfers, key=lambda box: (box.source, box.box.offsets, box.targets, box.target_at))


def _neighbors(overlap: _Overlap, locations: Locations) -> list[list[int]]:
    """Group the target ranks that share a source: ranks in the process of a holder, or else ranks of a node."""
    processes = {locations.sources[rank][:2] for rank, _ in overlap.holders}
    groups: dict[object, list[int]] = defaultdict(list)
    for rank in overlap.ranks:
        place = locations.targets[rank]
        groups[place[:2] if place[:2] in processes else place.node].append(rank)
    return list(groups.values())


def _distance(source: RankLocation, target: RankLocation) -> Locality:
    if source.node != target.node:
        return Locality.REMOTE
    return Locality.PROCESS if source.process == target.process else Locality.NODE
