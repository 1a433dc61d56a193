"""The resharding plan of a sync: which box of which tensor goes from which source rank to which target ranks. Pure.

Steps of ``make_plan``: each side alone (``merge_manifests``), names (``NameMatch``), the source boxes that make up each
target box (``find_overlaps``, once for all tensors of equal layout), and the replica that sends each of them
(``choose_senders``). Faults of all steps are raised as a single error.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from operator import add, sub
from typing import NamedTuple

from phalanx.display.byte_format import size
from phalanx.display.tables import Table
from phalanx.weights.boxes import Box, LocalBox, Run, find_overlap, meet, volume, without
from phalanx.weights.manifest import DTYPE_BYTES, LayoutFault, Manifest, merge_manifests, refuse
from phalanx.weights.name_matching import BUILT_IN, Fused, NameMapping, NameMatch, Pair, Rename, seen_through

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
    source_at: tuple[int, ...]
    target_at: tuple[int, ...]


@dataclass(frozen=True)
class TensorBatch:
    """Tensors with equal boxes: each of ``pairs`` is sent in ``boxes``, cast from ``source_dtype`` to ``dtype``."""

    source_dtype: str
    dtype: str
    pairs: tuple[Pair, ...]
    boxes: tuple[TransferBox, ...]

    def nbytes(self, box: TransferBox) -> int:
        """Return the bytes of ``box`` of a pair, as sent."""
        return volume(box.box) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Plan:
    """All transfers of a sync. Equal manifests and locations lead to an equal plan.

    Attributes:
        batches: in the order in which all ranks work.
        copies: (name, its twin) at the target. The twin is copied from the name after the transfer.
        ties: (name, name of its storage) at the target. It arrives with the other name.
        surplus: names of the source that no target takes.
        targets: number of target ranks.
    """

    batches: tuple[TensorBatch, ...]
    copies: tuple[tuple[str, str], ...]
    ties: tuple[tuple[str, str], ...]
    surplus: tuple[str, ...]
    targets: int

    def of(self, *, source: int | None = None, target: int | None = None) -> Plan:
        """Return the part of the plan that concerns a rank, in the same order."""
        batches: list[TensorBatch] = []
        for batch in self.batches:
            boxes = tuple(box for box in batch.boxes if box.source == source or target in box.targets)
            if boxes:
                batches.append(replace(batch, boxes=boxes))
        return replace(self, batches=tuple(batches))

    def transfers(
        self, localities: Sequence[Locality] | None = None
    ) -> Iterator[tuple[TensorBatch, Pair, TransferBox]]:
        """Yield every box of every tensor, in the order in which all ranks work."""
        for batch in self.batches:
            boxes = [box for box in batch.boxes if localities is None or box.locality in localities]
            for pair in batch.pairs if boxes else ():
                for box in boxes:
                    yield batch, pair, box

    def boxes(self, localities: Sequence[Locality]) -> Iterator[TransferBox]:
        """Yield the boxes of some localities, once per batch of tensors."""
        for batch in self.batches:
            yield from (box for box in batch.boxes if box.locality in localities)

    def bytes_by_link(self) -> dict[tuple[int, int, Locality], int]:
        """Return the bytes from each source rank to each target rank, by locality."""
        links: dict[tuple[int, int, Locality], int] = defaultdict(int)
        for batch in self.batches:
            for box in batch.boxes:
                for target in box.targets:
                    links[box.source, target, box.locality] += batch.nbytes(box) * len(batch.pairs)
        return dict(sorted(links.items()))

    @property
    def nbytes(self) -> int:
        """Bytes that arrive, summed over the target ranks, without copies and ties."""
        return sum(self.bytes_by_link().values())


def explain_plan(
    plan: Plan, transports: Mapping[Locality, str], *, delta_base: int = 0, title: str = "weights"
) -> Table:
    """Return a table with a row for each pair of ranks, and notes.

    Args:
        transports: the transport of each locality.
        delta_base: bytes of the copies that sources keep for deltas; 0 without deltas.
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
    pairs = sorted({pair for batch in plan.batches for pair in batch.pairs})
    notes = {
        "by locality": ", ".join(f"{locality} {size(sums[locality])}" for locality in sorted(sums))
        or "nothing",
        "cast at the source": ", ".join(f"{kind} ({len(names)} tensors)" for kind, names in casts.items()),
        "renamed or fused": _few([f"{pair.source} -> {pair.target}" for pair in pairs if len({*pair}) > 1]),
        "tied, sent once": _few(
            [f"{twin} = {name} (copied there)" for name, twin in plan.copies]
            + [f"{alias} = {name} (one storage there)" for alias, name in plan.ties]
        ),
        "not taken by the target": _few(plan.surplus),
        "deltas": f"the sources keep one more copy of what they send, {size(delta_base)}"
        if delta_base
        else "",
    }
    count = len({pair.target for pair in pairs})
    return Table(
        f"{title}: {size(sum(sums.values()))} to {plan.targets} ranks, {count} tensors",
        ("from", "to", "locality", "transport", "bytes"),
        tuple(rows),
        tuple(f"{name}: {note}" for name, note in notes.items() if note),
    )


def _few(items: Sequence[str]) -> str:
    rest = f", and {len(items) - _MOST_NAMED} more" if len(items) > _MOST_NAMED else ""
    return ", ".join(items[:_MOST_NAMED]) + rest


_Holder = tuple[int, tuple[int, ...]]
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
        WeightsMismatch: if a name, type, shape or box of the two sides does not fit; it has all faults.
    """
    faults: list[LayoutFault] = []
    source, target = merge_manifests(sources, "source", faults), merge_manifests(targets, "target", faults)
    match = NameMatch(source, target, rename, (*fused, *BUILT_IN), faults)
    overlaps: dict[NameMapping, list[_Overlap]] = {}
    for mapping, pairs in match.mappings.items():
        overlaps[mapping], mismatch = find_overlaps(mapping)
        if mismatch is not None:
            faults += [mismatch._replace(name=name) for _, name in pairs]
    refuse(faults)

    def weight(mapping: NameMapping) -> tuple[int, str]:
        pairs = match.mappings[mapping]
        return -math.prod(mapping.target.shape) * len(pairs), pairs[0][1]

    load = [0] * len(sources)
    batches: list[TensorBatch] = []
    for mapping in sorted(match.mappings, key=weight):  # heavy tensors first: loads become even
        pairs = match.mappings[mapping]
        dtypes = mapping.source.dtype, mapping.target.dtype
        count = min(_useful_shares(overlaps[mapping], locations), len(pairs), _MOST_SHARES)
        for index in range(count):
            share = tuple(pairs[index::count])
            nbytes = DTYPE_BYTES[dtypes[1]] * len(share)
            boxes = choose_senders(overlaps[mapping], locations, load, nbytes)
            if boxes:
                boxes.sort(key=lambda box: (box.source, box.box.offsets, box.targets, box.target_at))
                batches.append(TensorBatch(*dtypes, share, tuple(boxes)))
    batches.sort(key=lambda batch: (batch.pairs[0].target, batch.pairs[0].source, batch.boxes[0].box))
    findings = tuple(match.copies), tuple(sorted(target.ties.items())), tuple(match.surplus)
    return Plan(tuple(batches), *findings, len(targets))


class _Overlap(NamedTuple):
    """The part ``box`` of a box that the target ``ranks`` want.

    It is at ``target_at`` in their tensors, and at ``shift`` in the box that ``holders`` have.
    """

    ranks: list[int]
    box: Box
    holders: list[_Holder]
    shift: tuple[int, ...]
    target_at: tuple[int, ...]


def find_overlaps(mapping: NameMapping) -> tuple[list[_Overlap], LayoutFault | None]:
    """Intersect the boxes of the source layout with the boxes that the target layout needs, seen through the views.

    Returns:
        The overlaps, and a fault without a name if the source has a hole, or boxes that overlap in part.
    """
    holders: dict[Box, list[_Holder]] = defaultdict(list)
    for rank, boxes in mapping.source.holders:
        for box, at in seen_through(mapping.source_view, boxes):
            if volume(box):
                holders[box].append((rank, at))
    wanted: dict[LocalBox, list[int]] = defaultdict(list)
    for rank, boxes in mapping.target.holders:
        for local_box in seen_through(mapping.target_view, boxes):
            if volume(local_box.box):
                wanted[local_box].append(rank)
    doubled = find_overlap(holders)
    if doubled is not None:
        ranks = f"source ranks {holders[doubled[0]][0][0]} and {holders[doubled[1]][0][0]}"
        found = f"{meet(*doubled)}, an overlap"
        return [], LayoutFault("", "boxes that are equal or disjoint", found, ranks)
    index = _BoxIndex(list(holders))
    overlaps: list[_Overlap] = []
    for (box, at), ranks in wanted.items():
        left = [box]
        missing = volume(box)
        for held, shared in index.meeting(box):
            shift = tuple(map(sub, shared.offsets, held.offsets))
            target_at = tuple(a + b - o for a, b, o in zip(at, shared.offsets, box.offsets, strict=True))
            overlaps.append(_Overlap(ranks, shared, holders[held], shift, target_at))
            missing -= volume(shared)
        if missing:
            for _, shared in index.meeting(box):
                left = [rest for piece in left for rest in without(piece, shared)]
            found = f"a hole: no source rank has {left[0]}"
            return [], LayoutFault("", f"{box} at a source", found, f"target rank {ranks[0]}")
    return overlaps, None


class _BoxIndex:
    """Finds the boxes that intersect a box, by their offsets along the dimension on which they differ most."""

    def __init__(self, boxes: list[Box]) -> None:
        dims = range(len(boxes[0].sizes) if boxes else 0)
        self._dim = max(dims, key=lambda dim: len({box.offsets[dim] for box in boxes}), default=0)
        self._boxes = sorted(boxes, key=lambda box: (self._span(box), box))
        spans = [self._span(box) for box in self._boxes]
        self._starts = [start for start, _ in spans]
        self._longest = max((length for _, length in spans), default=0)

    def _span(self, box: Box) -> Run:
        return (box.offsets[self._dim], box.sizes[self._dim]) if box.sizes else (0, 1)

    def meeting(self, box: Box) -> Iterator[tuple[Box, Box]]:
        """Yield each box that intersects ``box``, and the intersection."""
        begin, length = self._span(box)
        first = bisect_left(self._starts, begin - self._longest + 1)
        for held in self._boxes[first : bisect_left(self._starts, begin + length)]:
            shared = meet(held, box)
            if shared is not None:
                yield held, shared


def _useful_shares(overlaps: Sequence[_Overlap], locations: Locations) -> int:
    """Return the number of batches into which tensors must be divided so that every replica can send some."""
    copies = max((len(overlap.holders) for overlap in overlaps), default=1)
    choices = sum(len({locations.targets[rank].node for rank in overlap.ranks}) for overlap in overlaps)
    return -(-copies // max(choices, 1))


def choose_senders(
    overlaps: Sequence[_Overlap], locations: Locations, load: list[int], nbytes: int
) -> list[TransferBox]:
    """Choose a source for every overlap: the nearest replica, among these the least loaded rank.

    Args:
        load: bytes that each source rank sends already. It grows.
        nbytes: bytes per element of all tensors of the batch.
    """
    transfers: list[TransferBox] = []
    for overlap in overlaps:
        readers: dict[tuple[Locality, _Holder], list[int]] = defaultdict(list)
        for ranks in _neighbors(overlap, locations):
            place = locations.targets[ranks[0]]
            distances = {holder: _distance(locations.sources[holder[0]], place) for holder in overlap.holders}
            nearest = min(distances, key=lambda holder: (distances[holder], load[holder[0]]))
            load[nearest[0]] += volume(overlap.box) * nbytes
            readers[distances[nearest], nearest] += ranks
        for (locality, (rank, at)), targets in readers.items():
            source_at = tuple(map(add, at, overlap.shift))
            box = TransferBox(
                rank, tuple(sorted(targets)), locality, overlap.box, source_at, overlap.target_at
            )
            transfers.append(box)
    return transfers


def _neighbors(overlap: _Overlap, locations: Locations) -> list[list[int]]:
    """Return the target ranks in groups that share a source: of a process with a source rank, or else of a node."""
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
