"""What the two ends of a mover do, whatever lies between them.

Both ends are given the same buckets (`phalanx.weights.planning.buckets`), so that only numbers of buckets need to
be told. A
source reads its tensors through ``read`` and a target writes its parameters through ``write``: both give views, so that
each byte is copied once on each side, and casts happen in the source's copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from phalanx.weights.planning.buckets import Bucket, Slot
from phalanx.weights.planning.tensors import dtype_named

__all__ = [
    "Note",
    "Read",
    "Received",
    "WeightReceiver",
    "WeightSender",
    "Write",
    "fill",
    "silent",
    "spread",
    "typed",
]

Read = Callable[[Slot], torch.Tensor]
"""The source's part of a slot, as a view, of the source's type."""

Write = Callable[[Slot], torch.Tensor]
"""Where the slot's elements belong, as a view of the target's memory."""


Note = Callable[[int], bytes]
"""What the source has to say to a target rank beside the buckets; asked once all of them are filled."""


def silent(target: int) -> bytes:
    """A note with nothing in it."""
    return b""


class Received(NamedTuple):
    """What came: bytes written, and the note of each source that had buckets for this rank."""

    nbytes: int
    notes: dict[int, bytes]


class WeightSender(Protocol):
    """One source rank's end."""

    def send(self, buckets: Sequence[Bucket], read: Read, *, timeout: float, note: Note = silent) -> int:
        """Send ``buckets``, in order, then its note to each reader; returns the bytes when all readers have them.

        Raises:
            WeightsTransferError: a reader died or did not come within ``timeout`` seconds. The end is closed.
        """
        ...

    def close(self) -> None:
        """Give everything back. May be called again."""
        ...


class WeightReceiver(Protocol):
    """One target rank's end."""

    def receive(self, buckets: Mapping[int, Sequence[Bucket]], write: Write, *, timeout: float) -> Received:
        """Receive from each source its buckets with this rank's slots, and its note.

        Raises:
            WeightsTransferError: a source died or did not come within ``timeout`` seconds. The end is closed, and
            what was
                written until then stays written.
        """
        ...

    def close(self) -> None:
        """Give everything back. May be called again."""
        ...


def typed(memory: torch.Tensor, slot: Slot) -> torch.Tensor:
    """A slot of a bucket that lies in ``memory``, bytes, as the elements that it is."""
    part = memory[slot.offset : slot.offset + slot.nbytes]
    return part.view(dtype_named(slot.dtype)).view(slot.sizes)


def fill(memory: torch.Tensor, bucket: Bucket, read: Read) -> None:
    """Copy a bucket's slots into ``memory``, with casts."""
    with torch.no_grad():
        for slot in bucket.slots:
            typed(memory, slot).copy_(read(slot))


def spread(memory: torch.Tensor, slots: Sequence[Slot], write: Write) -> int:
    """Copy slots from ``memory`` to where they belong; returns the bytes."""
    with torch.no_grad():
        for slot in slots:
            write(slot).copy_(typed(memory, slot))
    return sum(slot.nbytes for slot in slots)
