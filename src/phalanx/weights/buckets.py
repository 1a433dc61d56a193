"""Buckets: the boxes that a source sends, packed in sequence, in the order of the plan.

Source and target derive the same buckets from the same plan, so that only the number of a bucket is sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from phalanx.weights.manifest import DTYPE_BYTES
from phalanx.weights.plan import Locality, Plan

ALIGNMENT = 64
"""Bytes to whose multiples slots are aligned: a cache line, and more than any element needs."""


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
    """The ``number``-th bucket of a source: ``nbytes`` bytes that ``readers`` need."""

    source: int
    number: int
    nbytes: int
    readers: tuple[int, ...]
    slots: tuple[Slot, ...]


def buckets_from(
    plan: Plan,
    source: int,
    bucket_bytes: int,
    localities: Sequence[Locality] | None = None,
    *,
    by_readers: bool = False,
) -> tuple[Bucket, ...]:
    """Return all buckets that ``source`` sends over ``localities``, of at most ``bucket_bytes`` each.

    Boxes that do not fit are divided along their first dimensions.

    Args:
        by_readers: if True, a bucket has boxes for one set of readers only, so that no rank is sent bytes that it
            does not need. Otherwise all boxes share buckets, which is best if readers see the same memory.
    """
    buckets: list[Bucket] = []
    open_slots: dict[tuple[int, ...], list[Slot]] = {}
    for slot in _slots(plan, source, bucket_bytes, localities):
        key = slot.targets if by_readers else ()
        slots = open_slots.setdefault(key, [])
        offset = -(-_end(slots) // ALIGNMENT) * ALIGNMENT
        if slots and offset + slot.nbytes > bucket_bytes:
            buckets.append(_bucket(source, len(buckets), slots))
            slots = open_slots[key] = []
            offset = 0
        slots.append(slot._replace(offset=offset))
    for slots in open_slots.values():
        buckets.append(_bucket(source, len(buckets), slots))
    return tuple(buckets)


def buckets_to(
    plan: Plan,
    target: int,
    bucket_bytes: int,
    localities: Sequence[Locality] | None = None,
    *,
    by_readers: bool = False,
) -> dict[int, tuple[Bucket, ...]]:
    """Return the buckets that ``target`` reads, by source, with only its slots.

    ``plan`` must be complete, not the target's part of it: buckets are packed with all boxes of a source.
    """
    senders = sorted({box.source for batch in plan.batches for box in batch.boxes if target in box.targets})
    streams: dict[int, tuple[Bucket, ...]] = {}
    for source in senders:
        stream = tuple(
            bucket._replace(slots=tuple(slot for slot in bucket.slots if target in slot.targets))
            for bucket in buckets_from(plan, source, bucket_bytes, localities, by_readers=by_readers)
            if target in bucket.readers
        )
        if stream:
            streams[source] = stream
    return streams


def _end(slots: Sequence[Slot]) -> int:
    return slots[-1].offset + slots[-1].nbytes if slots else 0


def _bucket(source: int, number: int, slots: list[Slot]) -> Bucket:
    readers = sorted({target for slot in slots for target in slot.targets})
    return Bucket(source, number, _end(slots), tuple(readers), tuple(slots))


def _slots(plan: Plan, source: int, limit: int, localities: Sequence[Locality] | None) -> Iterator[Slot]:
    for batch, pair, box in plan.transfers(localities):
        if box.source != source:
            continue
        itemsize = DTYPE_BYTES[batch.dtype]
        for start, sizes in _blocks(box.box.sizes, limit // itemsize):
            source_at = tuple(a + s for a, s in zip(box.source_at, start, strict=True))
            target_at = tuple(a + s for a, s in zip(box.target_at, start, strict=True))
            names = pair.source, source_at, pair.target, target_at
            yield Slot(0, math.prod(sizes) * itemsize, batch.dtype, sizes, *names, box.targets)


def _blocks(sizes: tuple[int, ...], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Divide ``sizes`` into blocks of at most ``limit`` elements, as (start, sizes)."""
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
