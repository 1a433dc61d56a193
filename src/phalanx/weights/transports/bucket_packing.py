"""How the slots of a bucket lie in the memory that travels: as they are, or as what changed since a version before.

Packed as deltas, a bucket is a head (the base version and, for each slot, where its part is and of which kind) and the
parts one after another; see :mod:`phalanx.weights.planning.delta`. Its length is told with it, and is never more than
:meth:`Packing.room` says.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from phalanx.errors import WeightsTransferError
from phalanx.weights.planning.buckets import Bucket, Slot
from phalanx.weights.planning.delta import Base, Delta, Kind, apply_delta
from phalanx.weights.planning.tensors import dtype_named
from phalanx.weights.transports.transport_interface import Read, Write, fill, spread

__all__ = ["PLAIN", "DeltaPacking", "Packing"]

_HEAD = struct.Struct("<qq")
_PART = struct.Struct("<qqqqq")
_KINDS: tuple[Kind, ...] = ("none", "sparse", "xor", "dense")
_NO_BASE = -1


class Packing(Protocol):
    """Of one end, from sync to sync."""

    def room(self, bucket: Bucket) -> int:
        """Bytes that a bucket takes at most."""
        ...

    def pack(self, memory: torch.Tensor, bucket: Bucket, read: Read) -> int:
        """Put a bucket into ``memory``, of ``room`` bytes at least; returns the bytes used."""
        ...

    def unpack(self, memory: torch.Tensor, slots: Sequence[Slot], write: Write) -> int:
        """Put some slots of a bucket where they belong; returns the bytes of their elements."""
        ...


class _Plain:
    def room(self, bucket: Bucket) -> int:
        return bucket.nbytes

    def pack(self, memory: torch.Tensor, bucket: Bucket, read: Read) -> int:
        fill(memory, bucket, read)
        return bucket.nbytes

    def unpack(self, memory: torch.Tensor, slots: Sequence[Slot], write: Write) -> int:
        return spread(memory, slots, write)


PLAIN: Packing = _Plain()
"""Slots as they are."""


class DeltaPacking:
    """Slots as what changed. A source and a target have one each, for one mover and one plan.

    ``begin`` says, before each sync, which version both sides have; None: everything is sent. A source keeps what it
    sent, in the types of the targets, as the base of the next version: one more copy, in host memory. After any error
    both ends are made anew, and everything is sent.
    """

    def __init__(self) -> None:
        self.base = Base()
        self._known: int | None = None
        self._moving = False

    def begin(self, known: int | None) -> None:
        """Both sides begin a sync. At a source: all targets have version ``known`` over these ends, or get everything.

        At a target: it has ``known`` over these ends, or must get everything.
        """
        if known is None or known != self.base.version or self._moving:
            self.base.drop(keep_base=False)
        self._known, self._moving = known, True

    def end(self, number: int) -> None:
        """Version ``number`` was sent, or has arrived."""
        self.base.confirm(number)
        self._moving = False

    def room(self, bucket: Bucket) -> int:
        """See :class:`Packing`."""
        parts = sum(slot.nbytes for slot in bucket.slots)
        return _HEAD.size + _PART.size * len(bucket.slots) + parts

    def pack(self, memory: torch.Tensor, bucket: Bucket, read: Read) -> int:
        """See :class:`Packing`."""
        array: Any = memory.numpy()
        version = self.base.version
        head = bytearray(_HEAD.pack(_NO_BASE if version is None else version, len(bucket.slots)))
        at = _HEAD.size + _PART.size * len(bucket.slots)
        for slot in bucket.slots:
            given = read(slot).detach().to(dtype_named(slot.dtype))
            delta = self.base.advance((bucket.number, slot.offset), given)
            array[at : at + delta.nbytes] = np.frombuffer(delta.payload, np.uint8)
            head += _PART.pack(slot.offset, _KINDS.index(delta.kind), delta.changed, at, delta.nbytes)
            at += delta.nbytes
        array[: len(head)] = np.frombuffer(head, np.uint8)
        return at

    def unpack(self, memory: torch.Tensor, slots: Sequence[Slot], write: Write) -> int:
        """See :class:`Packing`.

        Raises:
            WeightsTransferError: it is what changed since a version that this rank does not have; nothing is written.
        """
        array: Any = memory.numpy()
        text = memoryview(array)
        base: int
        base, count = _HEAD.unpack_from(text)
        if base != _NO_BASE and base != self._known:
            raise WeightsTransferError(
                f"what changed since version {base} came to a rank that has version {self._known}; sync again, which "
                "sends everything"
            )
        parts = {part[0]: part[1:] for part in _PART.iter_unpack(text[_HEAD.size :][: count * _PART.size])}
        for slot in slots:
            kind, changed, at, length = parts[slot.offset]
            target = write(slot)
            delta = Delta(base, _KINDS[kind], changed, target.numel(), text[at : at + length])
            apply_delta(delta, target, base)
        return sum(slot.nbytes for slot in slots)
