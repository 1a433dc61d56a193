"""Ranks of any nodes: each bucket once through an object store, from which its readers fetch it.

What the store is, the caller says: on Ray, `put` stores an object and the call returns its reference by (source,
number), and `get` waits for one that came as an argument. Buckets are made by sets of readers, so that nobody fetches
what it does not need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from phalanx.movers.contract import Read, Write, fill, spread
from phalanx.movers.deadline import Deadline
from phalanx.transfer.buckets import Bucket

__all__ = ["Shelf", "StoreSource", "StoreTarget"]


class Shelf(Protocol):
    """Where buckets lie between the two sides."""

    def put(self, source: int, number: int, memory: torch.Tensor) -> None:
        """Keep these bytes; the memory is the shelf's from now on."""
        ...

    def get(self, source: int, number: int, timeout: float) -> torch.Tensor:
        """The bytes of a bucket, waited for; may be read-only.

        Raises:
            WeightsLost: the source died, or it was not there in time.
        """
        ...


class StoreSource:
    """A source's end: done when all buckets are stored."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def send(self, buckets: Sequence[Bucket], read: Read, *, timeout: float) -> int:
        """See :class:`phalanx.movers.contract.SourceEnd`; does not wait for the readers."""
        deadline = Deadline(timeout)
        for bucket in buckets:
            deadline.left(f"bucket {bucket.number} of this rank")
            memory = torch.empty(bucket.nbytes, dtype=torch.uint8)
            fill(memory, bucket, read)
            self._shelf.put(bucket.source, bucket.number, memory)
        return sum(bucket.nbytes for bucket in buckets)

    def close(self) -> None:
        """What was stored goes with its references."""


class StoreTarget:
    """A target's end: fetches one bucket after another."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def receive(self, buckets: Mapping[int, Sequence[Bucket]], write: Write, *, timeout: float) -> int:
        """See :class:`phalanx.movers.contract.TargetEnd`."""
        deadline = Deadline(timeout)
        written = 0
        for bucket in sorted((one for stream in buckets.values() for one in stream), key=_turn):
            left = deadline.left(f"source rank {bucket.source}")
            memory = self._shelf.get(bucket.source, bucket.number, left)
            written += spread(memory, bucket.slots, write)
        return written

    def close(self) -> None:
        """Nothing is held."""


def _turn(bucket: Bucket) -> tuple[int, int]:
    return bucket.number, bucket.source
