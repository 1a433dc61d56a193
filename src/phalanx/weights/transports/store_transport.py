"""Ranks of any nodes: each bucket once through an object store, from which its readers fetch it.

What the store is, the caller says: on Ray, `put` stores an object and the call returns its reference by (source,
number), and `get` waits for one that came as an argument. Buckets are made by sets of readers, so that nobody fetches
what it does not need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from phalanx.weights.planning.buckets import Bucket
from phalanx.weights.transports.bucket_packing import PLAIN, Packing
from phalanx.weights.transports.deadline import Deadline
from phalanx.weights.transports.transport_interface import Note, Read, Received, Write, silent

__all__ = ["Shelf", "StoreSource", "StoreTarget"]


class Shelf(Protocol):
    """Where buckets lie between the two sides."""

    def put(self, source: int, number: int, memory: torch.Tensor) -> None:
        """Keep these bytes; the memory is the shelf's from now on."""
        ...

    def get(self, source: int, number: int, timeout: float) -> torch.Tensor:
        """The bytes of a bucket, waited for; may be read-only.

        Raises:
            WeightsTransferError: the source died, or it was not there in time.
        """
        ...

    def tell(self, source: int, target: int, note: bytes) -> None:
        """Keep a note for a target rank."""
        ...

    def told(self, source: int, target: int, timeout: float) -> bytes:
        """The note for a target rank; waited for as a bucket is."""
        ...


class StoreSource:
    """A source's end: done when all buckets are stored."""

    def __init__(self, shelf: Shelf, packing: Packing = PLAIN) -> None:
        self._shelf = shelf
        self._packing = packing

    def send(self, buckets: Sequence[Bucket], read: Read, *, timeout: float, note: Note = silent) -> int:
        """See :class:`phalanx.weights.transports.transport_interface.SourceEnd`; does not wait for the readers."""
        deadline = Deadline(timeout)
        packed = 0
        for bucket in buckets:
            deadline.left(f"bucket {bucket.number} of this rank")
            memory = torch.empty(self._packing.room(bucket), dtype=torch.uint8)
            length = self._packing.pack(memory, bucket, read)
            packed += length
            self._shelf.put(bucket.source, bucket.number, memory[:length])
        for source, reader in sorted({(one.source, reader) for one in buckets for reader in one.readers}):
            self._shelf.tell(source, reader, note(reader))
        return packed

    def close(self) -> None:
        """What was stored goes with its references."""


class StoreTarget:
    """The end of the target ``rank``: fetches one bucket after another."""

    def __init__(self, shelf: Shelf, rank: int, packing: Packing = PLAIN) -> None:
        self._shelf = shelf
        self._rank = rank
        self._packing = packing

    def receive(self, buckets: Mapping[int, Sequence[Bucket]], write: Write, *, timeout: float) -> Received:
        """See :class:`phalanx.weights.transports.transport_interface.TargetEnd`."""
        deadline = Deadline(timeout)
        written = 0
        for bucket in sorted((one for stream in buckets.values() for one in stream), key=_turn):
            left = deadline.left(f"source rank {bucket.source}")
            memory = self._shelf.get(bucket.source, bucket.number, left)
            written += self._packing.unpack(memory, bucket.slots, write)
        notes = {
            source: self._shelf.told(source, self._rank, deadline.left(f"source rank {source}"))
            for source in buckets
        }
        return Received(written, notes)

    def close(self) -> None:
        """Nothing is held."""


def _turn(bucket: Bucket) -> tuple[int, int]:
    return bucket.number, bucket.source
