"""Layout of a bucket in the memory that is sent: the elements, or deltas.

A delta has the elements that changed since a version that both sides have, bit for bit: positions and values, or
everything, whichever is smaller. A bucket of deltas has a header (the base version and, for each slot, position and
number of changes) and the deltas in sequence. Its length is sent with it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from phalanx.errors import WeightsTransferError
from phalanx.weights.buckets import Bucket, Slot
from phalanx.weights.tensors import INTEGERS, dtype_named

_INDEX = np.int32
_HEADER = struct.Struct("<qq")
_PART = struct.Struct("<qqqq")
_NO_BASE = -1
_EVERYTHING = -1


def _integers(tensor: torch.Tensor) -> Any:
    """Return the bits of a tensor: its own memory if it is contiguous on the host, else a copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(INTEGERS[tensor.element_size()]).numpy()


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


Read = Callable[[Slot], torch.Tensor]
"""Returns the source's part of a slot as a view of the source's type."""
Write = Callable[[Slot], torch.Tensor]
"""Returns the view of the target's memory into which a slot is written."""


class Packing:
    """Packs and unpacks the elements themselves. The copy into the bucket casts to the target's type."""

    def capacity(self, bucket: Bucket) -> int:
        """Return the maximum number of bytes of a packed bucket."""
        return bucket.nbytes

    def pack(self, memory: torch.Tensor, bucket: Bucket, read: Read) -> int:
        """Pack a bucket into ``memory``, of at least ``capacity`` bytes, and return the bytes used."""
        with torch.no_grad():
            for slot in bucket.slots:
                _elements(memory, slot).copy_(read(slot))
        return bucket.nbytes

    def unpack(self, memory: torch.Tensor, slots: Sequence[Slot], write: Write) -> int:
        """Write some slots of a bucket to the target and return the bytes of their elements."""
        with torch.no_grad():
            for slot in slots:
                write(slot).copy_(_elements(memory, slot))
        return sum(slot.nbytes for slot in slots)


def _elements(memory: torch.Tensor, slot: Slot) -> torch.Tensor:
    part = memory[slot.offset : slot.offset + slot.nbytes]
    return part.view(dtype_named(slot.dtype)).view(slot.sizes)


class DeltaPacking(Packing):
    """Packs the changes since the version that both sides have. Source and target have an object each per transport.

    A source keeps its last version, in the types of the targets, as the base: another copy, in host memory. After an
    error both sides are connected anew and everything is sent.
    """

    def __init__(self) -> None:
        self._base: dict[tuple[int, int], torch.Tensor] = {}
        self._version: int | None = None
        self._known: int | None = None
        self._is_syncing = False

    def begin(self, known: int | None) -> None:
        """Begin a sync of targets that all have version ``known``; None: everything is sent."""
        if known is None or known != self._version or self._is_syncing:
            self._base, self._version = {}, None
        self._known, self._is_syncing = known, True

    def end(self, number: int) -> None:
        """Note that version ``number`` was sent or has arrived: it is the base now."""
        self._version, self._is_syncing = number, False

    def capacity(self, bucket: Bucket) -> int:
        elements = sum(slot.nbytes for slot in bucket.slots)
        return _HEADER.size + _PART.size * len(bucket.slots) + elements

    def pack(self, memory: torch.Tensor, bucket: Bucket, read: Read) -> int:
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
        old = self._base.get(key) if self._version is not None else None
        delta = make_delta(new, old)
        if old is None:
            self._base[key] = new.to("cpu", copy=True).contiguous()
        else:
            old.copy_(new)
        return delta

    def unpack(self, memory: torch.Tensor, slots: Sequence[Slot], write: Write) -> int:
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
        return sum(slot.nbytes for slot in slots)
