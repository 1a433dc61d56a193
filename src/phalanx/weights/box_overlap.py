"""The geometry of a plan: the source boxes that make up each target box, and the replica that sends each of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import add, sub
from typing import NamedTuple

from phalanx.weights.boxes import Box, LocalBox, meet, volume, without
from phalanx.weights.fused import View, seen_through
from phalanx.weights.plan import Locality, Locations, RankLocation, TransferBox
from phalanx.weights.shard_index import LayoutFault, TensorLayout

_Holder = tuple[int, tuple[int, ...]]  # rank, and position of the box in its local tensor
_Process = tuple[str, str]  # node and process


@dataclass
class _Replicas:
    """The ranks that hold a box, by location."""

    box: Box
    holders: list[_Holder] = field(default_factory=list)
    by_process: dict[_Process, _Holder] = field(default_factory=dict)
    by_node: dict[str, list[_Holder]] = field(default_factory=lambda: defaultdict(list))

    def add(self, rank: int, at: tuple[int, ...], location: RankLocation) -> None:
        self.holders.append((rank, at))
        self.by_process.setdefault(location[:2], (rank, at))
        self.by_node[location.node].append((rank, at))


class _Part(NamedTuple):
    """The part of a wanted box that ``replicas`` have: ``shift`` is its position in theirs."""

    box: Box
    replicas: _Replicas
    shift: tuple[int, ...]
    target_at: tuple[int, ...]


class _Want(NamedTuple):
    """A box that ``ranks`` of the target need, in its parts at the source."""

    ranks: list[int]
    parts: list[_Part]


class Geometry(NamedTuple):
    """All wanted boxes of the tensors of a layout.

    ``shares`` is the number of batches into which the tensors must be divided so that every replica can send some.
    """

    wants: list[_Want]
    shares: int


def find_overlaps(
    source: TensorLayout, target: TensorLayout, views: tuple[View | None, View | None], locations: Locations
) -> tuple[Geometry, list[LayoutFault]]:
    """Intersect the boxes of ``source`` with the boxes that ``target`` needs, both seen through ``views``.

    Returns:
        The geometry, and faults without a name: holes, and source boxes that overlap in part.
    """
    held: dict[Box, _Replicas] = {}
    for rank, boxes in source.holders:
        for box, at in seen_through(views[0], boxes):
            if volume(box):
                held.setdefault(box, _Replicas(box)).add(rank, at, locations.sources[rank])
    wanted: dict[LocalBox, list[int]] = defaultdict(list)
    for rank, boxes in target.holders:
        for local_box in seen_through(views[1], boxes):
            if volume(local_box.box):
                wanted[local_box].append(rank)
    index = _BoxIndex(list(held.values()))
    faults = _find_faults(list(held.values()))
    wants: list[_Want] = []
    for (box, at), ranks in wanted.items():
        parts: list[_Part] = []
        left = [box]
        for shared, replicas in index.meeting(box):
            shift = tuple(map(sub, shared.offsets, replicas.box.offsets))
            target_at = tuple(a + b - o for a, b, o in zip(at, shared.offsets, box.offsets, strict=True))
            parts.append(_Part(shared, replicas, shift, target_at))
        if sum(volume(part.box) for part in parts) != volume(box) and not faults:
            for part in parts:
                left = [rest for piece in left for rest in without(piece, part.box)]
            found = f"a hole: no source rank has {left[0]}"
            faults.append(LayoutFault("", f"{box} at a source", found, f"target rank {ranks[0]}"))
        wants.append(_Want(ranks, parts))
    copies = max((len(replicas.holders) for replicas in held.values()), default=1)
    choices = sum(
        len(want.parts) * len({locations.targets[rank].node for rank in want.ranks}) for want in wants
    )
    return Geometry(wants, -(-copies // max(choices, 1))), faults


class _BoxIndex:
    """Finds the boxes that intersect a box, by their offsets along the dimension on which they differ most."""

    def __init__(self, held: list[_Replicas]) -> None:
        dims = range(len(held[0].box.sizes) if held else 0)
        distinct = [len({replicas.box.offsets[dim] for replicas in held}) for dim in dims]
        self._dim = dim = distinct.index(max(distinct)) if distinct else None
        self._held = held
        if dim is not None:
            self._held = sorted(held, key=lambda replicas: (replicas.box.offsets[dim], replicas.box))
            self._starts = [replicas.box.offsets[dim] for replicas in self._held]
            self._longest = max(replicas.box.sizes[dim] for replicas in held)

    def meeting(self, box: Box) -> Iterator[tuple[Box, _Replicas]]:
        candidates = self._held
        if self._dim is not None:
            begin, size = box.offsets[self._dim], box.sizes[self._dim]
            first = bisect_left(self._starts, begin - self._longest + 1)
            candidates = self._held[first : bisect_left(self._starts, begin + size)]
        for replicas in candidates:
            shared = meet(replicas.box, box)
            if shared is not None:
                yield shared, replicas


def _find_faults(held: list[_Replicas]) -> list[LayoutFault]:
    """Return a fault if two boxes of the source overlap without being equal."""
    ordered = sorted(held, key=lambda replicas: replicas.box)
    for index, first in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if first.box.offsets and other.box.offsets[0] >= first.box.offsets[0] + first.box.sizes[0]:
                break
            shared = meet(first.box, other.box)
            if shared is not None:
                ranks = f"source ranks {first.holders[0][0]} and {other.holders[0][0]}"
                return [LayoutFault("", "boxes that are equal or disjoint", f"{shared}, an overlap", ranks)]
    return []


def choose_senders(
    geometry: Geometry, locations: Locations, load: list[int], nbytes: int
) -> list[TransferBox]:
    """Choose a source for every wanted box: the nearest replica, among these the least loaded rank.

    Args:
        load: bytes that each source rank sends already. It grows.
        nbytes: bytes per element.
    """
    return [
        box
        for want in geometry.wants
        for part in want.parts
        for box in _assign(part, want.ranks, locations, load, nbytes)
    ]


def _assign(
    part: _Part, ranks: Sequence[int], locations: Locations, load: list[int], nbytes: int
) -> Iterator[TransferBox]:
    """Yield transfers of a part to ``ranks``: a transfer for all readers with equal sender and locality."""
    readers: dict[tuple[Locality, _Holder], list[int]] = defaultdict(list)
    by_node: dict[str, list[int]] = defaultdict(list)
    cost = volume(part.box) * nbytes
    for rank in ranks:
        holder = part.replicas.by_process.get(locations.targets[rank][:2])
        if holder is None:
            by_node[locations.targets[rank].node].append(rank)
        else:
            load[holder[0]] += cost
            readers[Locality.PROCESS, holder].append(rank)
    for node, near in by_node.items():
        holders = part.replicas.by_node.get(node)
        locality = Locality.REMOTE if holders is None else Locality.NODE
        holders = holders or part.replicas.holders
        holder = min(holders, key=lambda holder: load[holder[0]])
        load[holder[0]] += cost
        readers[locality, holder] += near
    for (locality, (rank, at)), targets in readers.items():
        source_at = tuple(map(add, at, part.shift))
        yield TransferBox(rank, tuple(sorted(targets)), locality, part.box, source_at, part.target_at)
