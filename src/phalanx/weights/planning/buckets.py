"""The stream of buckets that a source sends: pieces packed one after another, in the order of the plan.

Source and target make the same buckets from the same plan, so that nothing but the number of a bucket needs to be told.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from phalanx.errors import DeclarationError
from phalanx.weights.planning.locality import Hop
from phalanx.weights.planning.resharding_plan import Lane, Pair, Piece, Plan
from phalanx.weights.planning.shard_manifest import DTYPE_BYTES

__all__ = ["ALIGNMENT", "Bucket", "Slot", "buckets_from", "buckets_to"]

ALIGNMENT = 64
"""Slots begin at multiples of it, in bytes: a cache line, and more than any element needs."""


class Slot(NamedTuple):
    """A part of a bucket: ``sizes`` elements of ``dtype`` from byte ``offset`` on, for the ranks ``targets``."""

    offset: int
    nbytes: int
    dtype: str
    sizes: tuple[int, ...]
    source_name: str
    source_at: tuple[int, ...]
    target_name: str
    target_at: tuple[int, ...]
    targets: tuple[int, ...]


class Bucket(NamedTuple):
    """What a source sends at once: the ``number``-th of its stream, read by ``readers``, ``nbytes`` in all."""

    source: int
    number: int
    nbytes: int
    readers: tuple[int, ...]
    slots: tuple[Slot, ...]


def buckets_from(
    plan: Plan,
    source: int,
    bucket_bytes: int,
    hops: Sequence[Hop] | None = None,
    *,
    by_readers: bool = False,
) -> tuple[Bucket, ...]:
    """All that ``source`` sends over ``hops``, in order, in buckets of at most ``bucket_bytes``.

    Pieces that do not fit are divided along their first dims.

    Args:
        by_readers: a bucket has pieces for one set of readers only, so that nobody is sent what it does not need;
            else pieces for all share buckets, which is best where readers look at one memory.

    Raises:
        DeclarationError: ``bucket_bytes`` is below 4096.
    """
    if bucket_bytes < 4096:
        raise DeclarationError(f"bucket_bytes={bucket_bytes}: give at least 4096 bytes, better 256 MB")
    made: list[Bucket] = []
    opened: dict[tuple[int, ...], list[Slot]] = {}
    for slot in _slots(plan, source, bucket_bytes, hops):
        key = slot.targets if by_readers else ()
        slots = opened.setdefault(key, [])
        offset = -(-_end(slots) // ALIGNMENT) * ALIGNMENT
        if slots and offset + slot.nbytes > bucket_bytes:
            made.append(_bucket(source, len(made), slots))
            slots = opened[key] = []
            offset = 0
        slots.append(slot._replace(offset=offset))
    for slots in opened.values():
        made.append(_bucket(source, len(made), slots))
    return tuple(made)


def buckets_to(
    plan: Plan,
    target: int,
    bucket_bytes: int,
    hops: Sequence[Hop] | None = None,
    *,
    by_readers: bool = False,
) -> dict[int, tuple[Bucket, ...]]:
    """What ``target`` reads: by source, the buckets that have something for it, with only its slots.

    ``plan`` must be whole, not the target's part of it: buckets are packed with all of a source's pieces.
    """
    senders = sorted({p.source for lane in plan.lanes for p in lane.pieces if target in p.targets})
    found: dict[int, tuple[Bucket, ...]] = {}
    for source in senders:
        mine = [
            bucket._replace(slots=tuple(slot for slot in bucket.slots if target in slot.targets))
            for bucket in buckets_from(plan, source, bucket_bytes, hops, by_readers=by_readers)
            if target in bucket.readers
        ]
        if mine:
            found[source] = tuple(mine)
    return found


def _end(slots: Sequence[Slot]) -> int:
    return slots[-1].offset + slots[-1].nbytes if slots else 0


def _bucket(source: int, number: int, slots: list[Slot]) -> Bucket:
    readers = sorted({target for slot in slots for target in slot.targets})
    return Bucket(source, number, _end(slots), tuple(readers), tuple(slots))


def _slots(plan: Plan, source: int, limit: int, hops: Sequence[Hop] | None) -> Iterator[Slot]:
    for lane in plan.lanes:
        pieces = [
            piece for piece in lane.pieces if piece.source == source and (hops is None or piece.hop in hops)
        ]
        blocks = [
            (piece, list(_blocks(piece.box.sizes, limit // DTYPE_BYTES[lane.dtype]))) for piece in pieces
        ]
        for pair in lane.pairs if pieces else ():
            for piece, parts in blocks:
                for start, sizes in parts:
                    yield _slot(lane, pair, piece, start, sizes)


def _slot(lane: Lane, pair: Pair, piece: Piece, start: tuple[int, ...], sizes: tuple[int, ...]) -> Slot:
    return Slot(
        0,
        math.prod(sizes) * DTYPE_BYTES[lane.dtype],
        lane.dtype,
        sizes,
        pair.source,
        tuple(a + s for a, s in zip(piece.source_at, start, strict=True)),
        pair.target,
        tuple(a + s for a, s in zip(piece.target_at, start, strict=True)),
        piece.targets,
    )


def _blocks(sizes: tuple[int, ...], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """``sizes`` divided into blocks of at most ``limit`` elements, as (start, sizes)."""
    if math.prod(sizes) <= limit:
        yield (0,) * len(sizes), sizes
        return
    inner = math.prod(sizes[1:])
    if inner > limit:
        for row in range(sizes[0]):
            for start, block in _blocks(sizes[1:], limit):
                yield (row, *start), (1, *block)
        return
    step = limit // inner
    for row in range(0, sizes[0], step):
        yield (row, *(0,) * (len(sizes) - 1)), (min(step, sizes[0] - row), *sizes[1:])
