"""Which boxes of the sources make up each box of the targets, and which replica gives each: the geometry of a plan."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import add, sub
from typing import NamedTuple

from phalanx.weights.planning.boxes import Box, Patch, meet, volume, without
from phalanx.weights.planning.fused import View, seen_through
from phalanx.weights.planning.layout_mismatch import Fault
from phalanx.weights.planning.locality import Hop, Place, Places, nodes_of
from phalanx.weights.planning.resharding_plan import Piece
from phalanx.weights.planning.shard_index import Form

__all__ = ["Geometry", "choose", "overlaps"]

_Holder = tuple[int, tuple[int, ...]]  # rank, and where the box begins there


@dataclass
class _Replicas:
    """The ranks that hold one box, by where they are."""

    box: Box
    holders: list[_Holder] = field(default_factory=list)
    by_process: dict[Place, _Holder] = field(default_factory=dict)
    by_node: dict[str, list[_Holder]] = field(default_factory=lambda: defaultdict(list))

    def add(self, rank: int, at: tuple[int, ...], place: Place) -> None:
        self.holders.append((rank, at))
        self.by_process.setdefault(place, (rank, at))
        self.by_node[place.node].append((rank, at))


class _Part(NamedTuple):
    """A box that ``replicas`` have some of a wanted box in: ``shift`` into theirs (empty: none), and where it goes."""

    box: Box
    replicas: _Replicas
    volume: int
    shift: tuple[int, ...]
    target_at: tuple[int, ...]


class _Want(NamedTuple):
    """A box that ``ranks`` of the target need at ``at``, and the replicas that have some of it.

    ``exact``: those parts are disjoint and make up the box; else some lie within others.
    """

    box: Box
    at: tuple[int, ...]
    ranks: list[int]
    parts: list[_Part]
    exact: bool


class Geometry(NamedTuple):
    """All that is wanted of tensors of one form.

    ``lanes``: into how many shares the tensors must be divided so that every replica can be given something.
    """

    wants: list[_Want]
    lanes: int


def overlaps(
    source: Form, target: Form, views: tuple[View | None, View | None], places: Places
) -> tuple[Geometry, list[Fault]]:
    """Intersect what ``source`` holds with what ``target`` needs, both seen through ``views``.

    Returns:
        The geometry, and the faults of it, without a name: holes, and source boxes that overlap in part.
    """
    held = _held(source, views[0], places)
    faults: list[Fault] = []
    index = _Index(list(held.values()))
    wanted: dict[Patch, list[int]] = defaultdict(list)
    for rank, patches in target.holders:
        for patch in seen_through(views[1], patches):
            if volume(patch.box):
                wanted[patch].append(rank)
    wants: list[_Want] = []
    for patch, ranks in wanted.items():
        parts = [_part(box, replicas, *patch) for box, replicas in index.meeting(patch.box)]
        fits = sum(part.volume for part in parts) == volume(patch.box) and _disjoint(parts)
        if not fits:
            faults += _faults(patch.box, ranks[0], parts)
        wants.append(_Want(patch.box, patch.at, ranks, parts, fits))
    copies = max((len(one.holders) for one in held.values()), default=1)
    choices = sum(len(want.parts) * len({places.targets[rank].node for rank in want.ranks}) for want in wants)
    return Geometry(wants, -(-copies // max(choices, 1))), faults


def _held(source: Form, view: View | None, places: Places) -> dict[Box, _Replicas]:
    held: dict[Box, _Replicas] = {}
    for rank, patches in source.holders:
        for box, at in seen_through(view, patches):
            if volume(box):
                held.setdefault(box, _Replicas(box)).add(rank, at, places.sources[rank])
    return held


class _Index:
    """Finds the boxes that meet one, by their offsets along the dim on which they differ most."""

    def __init__(self, held: list[_Replicas]) -> None:
        dims = len(held[0].box.sizes) if held else 0
        distinct = [len({one.box.offsets[dim] for one in held}) for dim in range(dims)]
        self._dim = distinct.index(max(distinct)) if distinct else None
        if self._dim is not None:
            dim = self._dim
            held = sorted(held, key=lambda one: (one.box.offsets[dim], one.box))
            self._starts = [one.box.offsets[dim] for one in held]
            self._longest = max(one.box.sizes[dim] for one in held)
        self._held = held

    def meeting(self, box: Box) -> Iterator[tuple[Box, _Replicas]]:
        found = self._held
        if self._dim is not None:
            begin, size = box.offsets[self._dim], box.sizes[self._dim]
            first = bisect_left(self._starts, begin - self._longest + 1)
            found = self._held[first : bisect_left(self._starts, begin + size)]
        for one in found:
            part = meet(one.box, box)
            if part is not None:
                yield part, one


def _disjoint(parts: Sequence[_Part]) -> bool:
    """Whether boxes whose volumes add up right do so without a hole and an overlap that cancel each other."""
    if len(parts) < 3:
        return True
    ordered = sorted(part.box for part in parts)
    for index, one in enumerate(ordered):
        end = one.offsets[0] + one.sizes[0]
        for other in ordered[index + 1 :]:
            if other.offsets[0] >= end:
                break
            if meet(one, other):
                return False
    return True


def _faults(box: Box, rank: int, parts: Sequence[_Part]) -> Iterator[Fault]:
    left = [box]
    for part in parts:
        left = [rest for one in left for rest in without(one, part.box)]
    where = f"target rank {rank}"
    if left:
        yield Fault("", f"{box} at a source", f"a hole: no source rank has {left[0]}", where)
    held = [part.replicas for part in parts]
    for index, one in enumerate(held):
        for other in held[index + 1 :]:
            shared = meet(one.box, other.box)
            if shared is not None and shared not in (one.box, other.box):
                ranks = f"source ranks {one.holders[0][0]} and {other.holders[0][0]}"
                yield Fault("", "boxes apart or one within the other", f"{shared}, an overlap", ranks)
                return


def choose(geometry: Geometry, places: Places, load: list[int], nbytes: int) -> list[Piece]:
    """A source for every part of every wanted box: the nearest replica, and of those the one with least to send.

    ``load`` is what each source rank sends already, in bytes, and grows; an element counts ``nbytes`` bytes.
    """
    pieces: list[Piece] = []
    for want in geometry.wants:
        if want.exact:
            for part in want.parts:
                _deal(part, want.ranks, places, load, nbytes, pieces)
        else:
            for rank in want.ranks:
                for part in _nearest_parts(want, places.targets[rank], load):
                    _deal(part, [rank], places, load, nbytes, pieces)
    return pieces


def _deal(
    part: _Part, ranks: Sequence[int], places: Places, load: list[int], nbytes: int, pieces: list[Piece]
) -> None:
    """Pieces of one part for ``ranks``: one for all that have the same sender at the same distance."""
    readers: dict[tuple[Hop, _Holder], tuple[int, ...]] = {}
    for hop, holder, near in _senders(part.replicas, ranks, places, load, part.volume * nbytes):
        readers[hop, holder] = (*readers.get((hop, holder), ()), *near)
    for (hop, (rank, at)), near in readers.items():
        source_at = tuple(map(add, at, part.shift)) if part.shift else at
        pieces.append(Piece(rank, tuple(sorted(near)), hop, part.box, source_at, part.target_at))


def _part(box: Box, replicas: _Replicas, wanted: Box, at: tuple[int, ...]) -> _Part:
    shift = tuple(map(sub, box.offsets, replicas.box.offsets))
    target_at = tuple(a + b - o for a, b, o in zip(at, box.offsets, wanted.offsets, strict=True))
    return _Part(box, replicas, volume(box), shift if any(shift) else (), target_at)


def _nearest_parts(want: _Want, place: Place, load: list[int]) -> Iterator[_Part]:
    """The wanted box for one rank, where source boxes lie within others: from the nearest first."""
    left = [want.box]
    for part in sorted(want.parts, key=lambda part: _cost(part.replicas, place, load)):
        rest: list[Box] = []
        for box in left:
            shared = meet(box, part.replicas.box)
            if shared is not None:
                yield _part(shared, part.replicas, want.box, want.at)
            rest += without(box, shared) if shared else [box]
        left = rest


def _cost(replicas: _Replicas, place: Place, load: list[int]) -> tuple[int, int, int, Box]:
    """Nearest first, then large boxes (fewer pieces), then the least busy."""
    hop, holders = _nearest(replicas, place)
    return hop, -volume(replicas.box), min(load[rank] for rank, _ in holders), replicas.box


def _nearest(replicas: _Replicas, place: Place) -> tuple[Hop, Sequence[_Holder]]:
    if place in replicas.by_process:
        return Hop.PROCESS, [replicas.by_process[place]]
    if place.node in replicas.by_node:
        return Hop.NODE, replicas.by_node[place.node]
    return Hop.OTHER, replicas.holders


def _senders(
    replicas: _Replicas, ranks: Sequence[int], places: Places, load: list[int], cost: int
) -> Iterator[tuple[Hop, _Holder, list[int]]]:
    """Who sends to whom: one sender for all readers on one node, but a role of the same process for its own."""
    by_process, far = replicas.by_process, list[int]()
    for rank in ranks:
        holder = by_process.get(places.targets[rank])
        if holder is None:
            far.append(rank)
        else:
            load[holder[0]] += cost
            yield Hop.PROCESS, holder, [rank]
    for node, readers in nodes_of(places.targets, far).items():
        near = replicas.by_node.get(node)
        hop, holders = (Hop.OTHER, replicas.holders) if near is None else (Hop.NODE, near)
        holder = holders[0]
        for other in holders:
            if load[other[0]] < load[holder[0]]:
                holder = other
        load[holder[0]] += cost
        yield hop, holder, readers
