"""Who writes what: each box of a tensor once, by one of the ranks that hold it, with even loads. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from phalanx.checkpoint.storage.tensor_index import Catalogue, Path, Piece, StoredTensor, StoredValue
from phalanx.errors import CheckpointError
from phalanx.weights.planning.boxes import Box, meet, volume, whole, without
from phalanx.weights.planning.shard_manifest import DTYPE_BYTES, Held

__all__ = ["Offer", "PlainTensor", "Spread", "WriteOrder", "Written", "catalogue_of", "spread"]


class PlainTensor(NamedTuple):
    """A tensor of which nothing says how it is sharded: whole where all ranks have the same, by digest."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True)
class Offer:
    """What one rank has to save, by key.

    Attributes:
        tensors: those whose boxes are known.
        plain: other tensors.
        values: digests of whatever else there is.
        paths: where each key lies in the state.
    """

    tensors: Mapping[str, Held] = field(default_factory=dict[str, Held])
    plain: Mapping[str, PlainTensor] = field(default_factory=dict[str, PlainTensor])
    values: Mapping[str, str] = field(default_factory=dict[str, str])
    paths: Mapping[str, Path] = field(default_factory=dict[str, Path])


class WriteOrder(NamedTuple):
    """An item that a rank is to write: the box of its local tensor that begins at ``at``; None: a value, pickled.

    ``digest`` is that of what was offered, where others rely on it.
    """

    key: str
    box: Box | None = None
    at: tuple[int, ...] = ()
    digest: str = ""


class Written(NamedTuple):
    """An item that was written: as :class:`~phalanx.checkpoint.storage.tensor_index.Piece`."""

    offset: int
    length: int
    data: int
    digest: str


@dataclass(frozen=True)
class Spread:
    """Orders by rank, and what each key is."""

    offers: tuple[Offer, ...]
    orders: tuple[tuple[WriteOrder, ...], ...]
    by_rank: frozenset[str]

    def nbytes(self, rank: int) -> int:
        """Of the tensors that a rank writes."""
        offer = self.offers[rank]
        return sum(
            volume(order.box)
            * DTYPE_BYTES.get((offer.tensors.get(order.key) or offer.plain[order.key]).dtype, 8)
            for order in self.orders[rank]
            if order.box is not None
        )


def spread(offers: Sequence[Offer]) -> Spread:
    """Decide who writes what of ``offers``, which are in rank order.

    Raises:
        CheckpointError: ranks contradict each other, or a tensor is not there as a whole.
    """
    return _Spreading(offers).run()


class _Spreading:
    def __init__(self, offers: Sequence[Offer]) -> None:
        self._offers = tuple(offers)
        self._load = [0] * len(offers)
        self._orders: list[list[WriteOrder]] = [[] for _ in offers]
        self._by_rank: set[str] = set()
        self._cuts: dict[tuple[Box, ...], tuple[tuple[Box, ...], ...]] = {}

    def run(self) -> Spread:
        tensors, plain, values = self._holders()
        for key, held in tensors.items():
            if key in plain or key in values:
                others = sorted({*plain.get(key, {}), *values.get(key, {})})
                raise CheckpointError(
                    f"{key} is a sharded tensor on ranks {_some(sorted(held))} and something else on ranks "
                    f"{_some(others)}; give it one name for one thing"
                )
            self._tensor(key, held)
        for key in sorted({*plain, *values}, key=lambda key: -self._size(plain.get(key, {}))):
            self._same_or_not(key, plain.get(key, {}), values.get(key, {}))
        return Spread(self._offers, tuple(map(tuple, self._orders)), frozenset(self._by_rank))

    def _holders(
        self,
    ) -> tuple[dict[str, dict[int, Held]], dict[str, dict[int, PlainTensor]], dict[str, dict[int, str]]]:
        tensors: dict[str, dict[int, Held]] = defaultdict(dict)
        plain: dict[str, dict[int, PlainTensor]] = defaultdict(dict)
        values: dict[str, dict[int, str]] = defaultdict(dict)
        for rank, offer in enumerate(self._offers):
            for key, held in offer.tensors.items():
                tensors[key][rank] = held
            for key, one in offer.plain.items():
                plain[key][rank] = one
            for key, digest in offer.values.items():
                values[key][rank] = digest
        return tensors, plain, values

    def _size(self, held: Mapping[int, PlainTensor]) -> int:
        return max((math.prod(one.shape) * DTYPE_BYTES.get(one.dtype, 8) for one in held.values()), default=0)

    def _tensor(self, key: str, held: Mapping[int, Held]) -> None:
        """Each element once: boxes that several ranks hold by the one that has least to write so far."""
        first_rank, first = next(iter(held.items()))
        holders: dict[Box, dict[int, tuple[int, ...]]] = defaultdict(dict)
        for rank, one in held.items():
            if (one.dtype, one.shape) != (first.dtype, first.shape):
                raise CheckpointError(
                    f"{key} is {first.dtype} {list(first.shape)} on rank {first_rank} and {one.dtype} "
                    f"{list(one.shape)} on rank {rank}; all ranks must mean the same global tensor"
                )
            for patch in one.patches:
                holders[patch.box][rank] = patch.at
        nbytes = DTYPE_BYTES.get(first.dtype, 8)
        covered = 0
        boxes = _large_first(holders)
        for box, parts in zip(boxes, self._disjoint(boxes), strict=True):
            rank = min(holders[box], key=lambda rank: self._load[rank])
            for part in parts:
                shift = (p - b for p, b in zip(part.offsets, box.offsets, strict=True))
                at = tuple(a + s for a, s in zip(holders[box][rank], shift, strict=True))
                self._orders[rank].append(WriteOrder(key, part, at))
                self._load[rank] += volume(part) * nbytes
                covered += volume(part)
        if covered != volume(whole(first.shape)):
            raise CheckpointError(
                f"the ranks hold {covered} of the {volume(whole(first.shape))} elements of {key} {list(first.shape)}: "
                "what was stated of its boxes, or of Megatron's ranks, is wrong, or ranks are missing here"
            )

    def _disjoint(self, boxes: Sequence[Box]) -> tuple[tuple[Box, ...], ...]:
        """Each box without those before it; found once for all tensors that are cut alike."""
        key = tuple(boxes)
        if key not in self._cuts:
            self._cuts[key] = tuple(tuple(_apart(box, boxes[:at])) for at, box in enumerate(boxes))
        return self._cuts[key]

    def _same_or_not(self, key: str, plain: Mapping[int, PlainTensor], values: Mapping[int, str]) -> None:
        """Once where all that have it have the same, else by rank."""
        found: list[PlainTensor | str] = [*plain.values(), *values.values()]
        ranks = sorted({*plain, *values})
        if any(one != found[0] for one in found[1:]):
            self._by_rank.add(key)
            for rank in ranks:
                self._orders[rank].append(WriteOrder(key))
                self._load[rank] += self._size({rank: plain[rank]} if rank in plain else {})
            return
        rank = min(ranks, key=lambda rank: self._load[rank])
        one = found[0]
        if isinstance(one, PlainTensor) and one.dtype in DTYPE_BYTES:
            box = whole(one.shape)
            self._orders[rank].append(WriteOrder(key, box, (0,) * len(one.shape), one.digest))
            self._load[rank] += self._size(plain)
        else:
            self._orders[rank].append(
                WriteOrder(key, digest=one.digest if isinstance(one, PlainTensor) else one)
            )


def _large_first(holders: Mapping[Box, object]) -> list[Box]:
    return sorted(holders, key=lambda box: (-volume(box), box))


def _apart(box: Box, taken: Sequence[Box]) -> list[Box]:
    """``box`` without what was taken before."""
    left = [box]
    for other in taken:
        if meet(box, other) is not None:
            left = [part for one in left for part in without(one, other)]
    return left


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def catalogue_of(plan: Spread, files: Sequence[str], written: Sequence[Sequence[Written]]) -> Catalogue:
    """The catalogue of what was written.

    Args:
        plan: the orders.
        files: names of the files by rank.
        written: the items by rank, in the order of the orders.
    """
    pieces: dict[str, list[tuple[int, Piece]]] = defaultdict(list)
    for rank, (orders, items) in enumerate(zip(plan.orders, written, strict=True)):
        for order, item in zip(orders, items, strict=True):
            pieces[order.key].append((rank, Piece(files[rank], *item, order.box)))
    paths: dict[str, Path] = {}
    having: dict[str, list[int]] = defaultdict(list)
    for rank, offer in enumerate(plan.offers):
        paths.update(offer.paths)
        for key in (*offer.tensors, *offer.plain, *offer.values):
            having[key].append(rank)
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, StoredValue] = {}
    for key, ranks in having.items():
        on = None if len(ranks) == len(plan.offers) else tuple(ranks)
        found = [piece for _, piece in sorted(pieces.get(key, []), key=lambda one: one[0])]
        form = next((one for offer in plan.offers if (one := _form(offer, key))), None)
        if form is not None and key not in plan.by_rank and all(one.box is not None for one in found):
            tensors[key] = StoredTensor(form[0], form[1], tuple(found), on)
        else:
            values[key] = StoredValue(tuple(found), on, key in plan.by_rank)
    return Catalogue(len(plan.offers), tensors, values, paths)


def _form(offer: Offer, key: str) -> tuple[str, tuple[int, ...]] | None:
    """Type and shape of a tensor."""
    one = offer.tensors.get(key) or offer.plain.get(key)
    return None if one is None else (one.dtype, one.shape)
