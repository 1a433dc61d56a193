"""Buckets: the boxes that a source sends, packed in sequence, in the order of the plan.

Source and target derive the same buckets from the same plan, so that only the number of a bucket is sent. A bucket
contains complete elements, or deltas: the elements whose bits changed since a version that both sides have. A delta
consists of positions and values, or of all values, whichever is smaller. For each slot, a bucket of deltas has a head
(offset, number of changes, bytes) and the delta. Its length is sent with it.
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import add
from typing import Any, NamedTuple

import numpy as np
import torch

from phalanx.weights.boxes import blocks, cut
from phalanx.weights.manifest import DTYPE_BYTES, Tensors, bits_of, dtype_named
from phalanx.weights.plan import Plan, Side
from phalanx.wire.value import Dims

ALIGNMENT = 64
"""Alignment of slots in bytes: a cache line, and more than any element needs."""
_INDEX = np.int32
_HEAD = struct.Struct("qqq")
_EVERYTHING = -1


class BucketSlot(NamedTuple):
    """A part of a bucket: elements of shape ``sizes`` from byte ``offset`` on, for the ranks ``targets``."""

    offset: int
    nbytes: int
    dtype: str
    sizes: Dims
    source_name: str
    source_at: Dims
    target_name: str
    target_at: Dims
    targets: tuple[int, ...]


class Bucket(NamedTuple):
    """Bucket ``number`` of a source rank, for the target ranks ``readers``."""

    source: int
    number: int
    nbytes: int
    readers: tuple[int, ...]
    slots: tuple[BucketSlot, ...]

    def of(self, target: int) -> Bucket:
        """Return the bucket with only the slots of a target rank."""
        return self._replace(slots=tuple(slot for slot in self.slots if target in slot.targets))


def bucket_streams(
    plan: Plan, side: Side, rank: int, limit: int, *, by_readers: bool = False
) -> dict[int, list[Bucket]]:
    """Return the buckets that a rank sends or reads, by source rank.

    Boxes of more than ``limit`` bytes are divided along their first dimensions. A target's buckets have only its slots.

    Args:
        plan: the plan of all ranks, since a bucket that a target reads has slots of other targets too.
        limit: maximum bytes of a bucket.
        by_readers: if True, all boxes of a bucket have the same readers, so that no rank is sent bytes that it does
            not need. Otherwise all boxes share buckets, which is best if readers see the same memory.
    """
    is_target = side == "target"
    sources = {box.source for box in plan.boxes if rank in box.targets} if is_target else {rank}
    streams: dict[int, list[Bucket]] = {source: [] for source in sorted(sources)}
    filling: dict[tuple[int, tuple[int, ...]], list[BucketSlot]] = defaultdict(list)

    def close(source: int, slots: list[BucketSlot]) -> None:
        readers = sorted({target for slot in slots for target in slot.targets})
        bucket = Bucket(source, len(streams[source]), _end(slots), tuple(readers), tuple(slots))
        streams[source].append(bucket)
        slots.clear()

    for batch, pair, box in plan.transfers():
        if box.source not in streams:
            continue
        slots, itemsize = filling[box.source, box.targets if by_readers else ()], DTYPE_BYTES[batch.dtype]
        for start, sizes in blocks(box.box.sizes, limit // itemsize):
            nbytes = math.prod(sizes) * itemsize
            offset = -(-_end(slots) // ALIGNMENT) * ALIGNMENT
            if slots and offset + nbytes > limit:
                close(box.source, slots)
                offset = 0
            source_at, target_at = (tuple(map(add, at, start)) for at in (box.source_at, box.target_at))
            names = pair.source, source_at, pair.target, target_at
            slots.append(BucketSlot(offset, nbytes, batch.dtype, sizes, *names, box.targets))
    for (source, _), slots in filling.items():
        close(source, slots)
    if is_target:
        streams = {
            source: [one.of(rank) for one in stream if rank in one.readers]
            for source, stream in streams.items()
        }
    return {source: stream for source, stream in streams.items() if stream}


def _end(slots: Sequence[BucketSlot]) -> int:
    return slots[-1].offset + slots[-1].nbytes if slots else 0


SlotView = Callable[[BucketSlot], torch.Tensor]
"""A function that returns a view for a slot: the source's elements, or the target's memory for them."""


def read_slot(tensors: Tensors, slot: BucketSlot) -> torch.Tensor:
    """Return a view of the source's elements of ``slot``, in the source's type. The copy into the bucket casts."""
    return cut(tensors[slot.source_name], slot.source_at, slot.sizes)


def write_slot(tensors: Tensors, slot: BucketSlot) -> torch.Tensor:
    """Return the view of the target's parameter into which ``slot`` is written."""
    return cut(tensors[slot.target_name], slot.target_at, slot.sizes)


def copy_slots(slots: Sequence[BucketSlot], read: SlotView, write: SlotView) -> None:
    """Copy the elements of slots. The copy casts."""
    for slot in slots:
        write(slot).copy_(read(slot))


class Packing:
    """Packing of complete elements. The copy into the bucket casts to the target's type."""

    #: True if the length of a packed bucket depends on the values, and on the version that both sides have.
    varies = False
    #: The version that this rank has: the last version that it sent or received; 0: none.
    known = 0

    def agree(self, known: Iterable[int]) -> None:
        """Note the versions that the other side has. Unless all of them are equal, everything is sent."""

    def capacity(self, bucket: Bucket) -> int:
        """Return the maximum number of bytes of a packed bucket."""
        return bucket.nbytes

    def pack(self, memory: torch.Tensor, bucket: Bucket, read: SlotView) -> int:
        """Pack a bucket into ``memory``, of at least ``capacity`` bytes, and return the bytes used."""
        copy_slots(bucket.slots, read, partial(_elements, memory))
        return bucket.nbytes

    def unpack(self, memory: torch.Tensor, slots: Sequence[BucketSlot], write: SlotView) -> None:
        """Write ``slots`` of the bucket in ``memory`` to the target."""
        copy_slots(slots, partial(_elements, memory), write)


def _elements(memory: torch.Tensor, slot: BucketSlot) -> torch.Tensor:
    part = memory[slot.offset : slot.offset + slot.nbytes]
    return part.view(dtype_named(slot.dtype)).view(slot.sizes)


class DeltaPacking(Packing):
    """Packing of the changes since the version that both sides have. Each endpoint has its own object.

    A source keeps its last version in host memory, in the types of the targets, as the base. After an error, both sides
    are connected again and everything is sent.
    """

    varies = True

    def __init__(self) -> None:
        self._base: dict[tuple[int, int], torch.Tensor] = {}

    def agree(self, known: Iterable[int]) -> None:
        if any(version != self.known for version in known):
            self.known = 0
        if not self.known:
            self._base = {}

    def capacity(self, bucket: Bucket) -> int:
        return sum(_HEAD.size + slot.nbytes for slot in bucket.slots)

    def pack(self, memory: torch.Tensor, bucket: Bucket, read: SlotView) -> int:
        array: Any = memory.numpy()
        at = 0
        for slot in bucket.slots:
            new = read(slot).to(dtype_named(slot.dtype))
            old = self._base.get((bucket.number, slot.offset))
            changed, payload = make_delta(new, old)
            if old is None:
                self._base[bucket.number, slot.offset] = new.to("cpu", copy=True).contiguous()
            else:
                old.copy_(new)  # slot by slot, so that the base is never in memory twice
            _HEAD.pack_into(array, at, slot.offset, changed, len(payload))
            begin, at = at + _HEAD.size, at + _HEAD.size + len(payload)
            array[begin:at] = np.frombuffer(payload, np.uint8)
        return at

    def unpack(self, memory: torch.Tensor, slots: Sequence[BucketSlot], write: SlotView) -> None:
        array: Any = memory.numpy()
        content, at, wanted = memoryview(array), 0, {slot.offset: slot for slot in slots}
        while at < len(content):
            offset, changed, nbytes = _HEAD.unpack_from(content, at)
            begin, at = at + _HEAD.size, at + _HEAD.size + nbytes
            if offset in wanted:
                apply_delta(changed, content[begin:at], write(wanted[offset]))


def make_delta(new: torch.Tensor, old: torch.Tensor | None) -> tuple[int, bytes | memoryview]:
    """Return the number of changed elements with their positions and values, or -1 with all values if this is smaller.

    Bits are compared, not values: a NaN with other bits and a zero with the other sign are changes. Without ``old``,
    all values are returned.
    """
    now = bits_of(new)
    positions = np.flatnonzero(now != bits_of(old)) if old is not None else np.arange(0)
    if old is None or positions.size * (_INDEX().itemsize + now.itemsize) >= now.nbytes:
        return _EVERYTHING, memoryview(now.view(np.uint8))
    return positions.size, positions.astype(_INDEX).tobytes() + now[positions].tobytes()


def apply_delta(changed: int, payload: memoryview | bytes, tensor: torch.Tensor) -> None:
    """Apply a delta of :func:`make_delta` to ``tensor`` in place."""
    if changed == 0:
        return
    now = bits_of(tensor)
    if changed == _EVERYTHING:
        now[:] = np.frombuffer(payload, now.dtype)
    else:
        end = changed * _INDEX().itemsize
        now[np.frombuffer(payload[:end], _INDEX)] = np.frombuffer(payload[end:], now.dtype)
    if now.ctypes.data != tensor.data_ptr():
        bits = torch.from_numpy(now.view(np.uint8)).view(tensor.dtype)
        tensor.copy_(bits.view(tensor.shape))
