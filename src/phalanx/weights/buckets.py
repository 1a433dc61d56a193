"""Buckets: the boxes that a source sends, packed in sequence, in the order of the plan.

Source and target derive the same buckets from the same plan, so that only the number of a bucket is sent. A bucket has
the elements themselves, or deltas: the elements that changed since a version that both sides have, bit for bit. A
delta is positions and values, or everything, whichever is smaller. A bucket of deltas has a header (the base version
and, for each slot, position and number of changes) and the deltas in sequence. Its length is sent with it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from phalanx.errors import WeightsTransferError
from phalanx.weights.boxes import blocks
from phalanx.weights.manifest import DTYPE_BYTES
from phalanx.weights.plan import Locality, Plan
from phalanx.weights.tensors import INTEGERS, Tensors, cut, dtype_named

ALIGNMENT = 64
"""Bytes to whose multiples slots are aligned: a cache line, and more than any element needs."""
_INDEX = np.int32
_HEADER = struct.Struct("<qq")
_PART = struct.Struct("<qqqq")
_NO_BASE = -1
_EVERYTHING = -1


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
        by_readers: if True, all boxes of a bucket have the same readers, so that no rank is sent bytes that it does
            not need. Otherwise all boxes share buckets, which is best if readers see the same memory.
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
        for start, sizes in blocks(box.box.sizes, limit // itemsize):
            source_at = tuple(a + s for a, s in zip(box.source_at, start, strict=True))
            target_at = tuple(a + s for a, s in zip(box.target_at, start, strict=True))
            names = pair.source, source_at, pair.target, target_at
            yield Slot(0, math.prod(sizes) * itemsize, batch.dtype, sizes, *names, box.targets)


SlotView = Callable[[Slot], torch.Tensor]
"""Returns a view: the source's elements of a slot, or the target's memory into which they are written."""


def read_slot(tensors: Tensors, slot: Slot) -> torch.Tensor:
    """Return the source's elements of ``slot`` as a view of the source's type. The copy into the bucket casts."""
    return cut(tensors[slot.source_name], slot.source_at, slot.sizes)


def write_slot(tensors: Tensors, slot: Slot) -> torch.Tensor:
    """Return the view of the target's parameter into which ``slot`` is written."""
    return cut(tensors[slot.target_name], slot.target_at, slot.sizes)


class Packing:
    """Packs and unpacks the elements themselves. The copy into the bucket casts to the target's type."""

    #: True if the length of a packed bucket depends on the values.
    varies = False

    def begin(self, known: int | None) -> None:
        """Begin a sync of targets that all have version ``known`` of this connection; None: they have none."""

    def end(self, number: int) -> None:
        """Note that version ``number`` was sent or has arrived."""

    def capacity(self, bucket: Bucket) -> int:
        """Return the maximum number of bytes of a packed bucket."""
        return bucket.nbytes

    def pack(self, memory: torch.Tensor, bucket: Bucket, read: SlotView) -> int:
        """Pack a bucket into ``memory``, of at least ``capacity`` bytes, and return the bytes used."""
        with torch.no_grad():
            for slot in bucket.slots:
                _elements(memory, slot).copy_(read(slot))
        return bucket.nbytes

    def unpack(self, memory: torch.Tensor, slots: Sequence[Slot], write: SlotView) -> None:
        """Write some slots of a bucket to the target."""
        with torch.no_grad():
            for slot in slots:
                write(slot).copy_(_elements(memory, slot))


def _elements(memory: torch.Tensor, slot: Slot) -> torch.Tensor:
    part = memory[slot.offset : slot.offset + slot.nbytes]
    return part.view(dtype_named(slot.dtype)).view(slot.sizes)


class DeltaPacking(Packing):
    """Packs the changes since the version that both sides have. Source and target have an object each per transport.

    A source keeps its last version, in the types of the targets, as the base: another copy, in host memory. After an
    error both sides are connected again and everything is sent.
    """

    varies = True

    def __init__(self) -> None:
        self._base: dict[tuple[int, int], torch.Tensor] = {}
        self._version: int | None = None
        self._known: int | None = None

    def begin(self, known: int | None) -> None:
        if known != self._version:
            self._base, self._version = {}, None
        self._known = known

    def end(self, number: int) -> None:
        self._version = number

    def capacity(self, bucket: Bucket) -> int:
        elements = sum(slot.nbytes for slot in bucket.slots)
        return _HEADER.size + _PART.size * len(bucket.slots) + elements

    def pack(self, memory: torch.Tensor, bucket: Bucket, read: SlotView) -> int:
        array: Any = memory.numpy()
        base = _NO_BASE if self._version is None else self._version
        header = bytearray(_HEADER.pack(base, len(bucket.slots)))
        at = _HEADER.size + _PART.size * len(bucket.slots)
        for slot in bucket.slots:
            new = read(slot).detach().to(dtype_named(slot.dtype))
            changed, payload = self._advance((bucket.number, slot.offset), new)
            end = at + len(payload)
            array[at:end] = np.frombuffer(payload, np.uint8)
            header += _PART.pack(slot.offset, changed, at, end)
            at = end
        array[: len(header)] = np.frombuffer(header, np.uint8)
        return at

    def _advance(self, key: tuple[int, int], new: torch.Tensor) -> tuple[int, bytes | memoryview]:
        """Return the delta of a slot to the base, and move the base on: there is never a second copy."""
        old = self._base.get(key)
        delta = make_delta(new, old)
        if old is None:
            self._base[key] = new.to("cpu", copy=True).contiguous()
        else:
            old.copy_(new)
        return delta

    def unpack(self, memory: torch.Tensor, slots: Sequence[Slot], write: SlotView) -> None:
        array: Any = memory.numpy()
        content = memoryview(array)
        base, count = _HEADER.unpack_from(content)
        if base not in (_NO_BASE, self._known):
            raise WeightsTransferError(
                f"received a delta for version {base}, but this rank has version {self._known}; sync again, the next "
                "sync sends everything"
            )
        parts = {
            part[0]: part[1:] for part in _PART.iter_unpack(content[_HEADER.size :][: count * _PART.size])
        }
        for slot in slots:
            changed, at, end = parts[slot.offset]
            apply_delta(changed, content[at:end], write(slot))


def make_delta(new: torch.Tensor, old: torch.Tensor | None) -> tuple[int, bytes | memoryview]:
    """Return the number of changed elements, and their positions and values, or all values if these are smaller.

    Bits are compared, not values: a NaN of other bits and a zero of another sign are changes. Without ``old``,
    everything is sent; the number is then -1.
    """
    now = _integers(new)
    positions = np.flatnonzero(now != _integers(old)) if old is not None else np.arange(0)
    if old is None or positions.size * (_INDEX().itemsize + now.itemsize) >= now.nbytes:
        return _EVERYTHING, memoryview(now.view(np.uint8))
    return positions.size, positions.astype(_INDEX).tobytes() + now[positions].tobytes()


def apply_delta(changed: int, payload: memoryview | bytes, tensor: torch.Tensor) -> None:
    """Apply a delta to ``tensor`` in place."""
    if changed == 0:
        return
    now = _integers(tensor)
    if changed == _EVERYTHING:
        now[:] = np.frombuffer(payload, now.dtype)
    else:
        end = changed * _INDEX().itemsize
        now[np.frombuffer(payload[:end], _INDEX)] = np.frombuffer(payload[end:], now.dtype)
    if now.ctypes.data != tensor.data_ptr():
        with torch.no_grad():
            bits = torch.from_numpy(now.view(np.uint8)).view(tensor.dtype)
            tensor.detach().copy_(bits.view(tensor.shape))


def _integers(tensor: torch.Tensor) -> Any:
    """Return the bits of a tensor: its own memory if it is contiguous on the host, else a copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(INTEGERS[tensor.element_size()]).numpy()
