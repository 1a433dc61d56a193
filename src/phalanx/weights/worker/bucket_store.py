"""Buckets in the backend's object store: put by a source rank, whose references go to the targets with their call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.errors import WeightsTransferError
from phalanx.weights.transports.deadline import lost
from phalanx.wire.memory import bytes_at

__all__ = ["OnShelf", "RankShelf"]


@dataclass
class OnShelf:
    """What one source rank has put for a sync: references by number of the bucket, and notes by target rank."""

    refs: dict[int, Any] = field(default_factory=dict[int, Any])
    notes: dict[int, bytes] = field(default_factory=dict[int, bytes])


class RankShelf:
    """The shelf as one rank sees it. A source fills its own part; a target is given those of its sources.

    Args:
        put: stores an array of bytes and gives a reference.
        fetch: the array behind one; raises TimeoutError if it is not here within so many seconds.
    """

    def __init__(self, put: Callable[[Any], Any], fetch: Callable[[Any, float], Any]) -> None:
        self._put = put
        self._fetch = fetch
        self.mine = OnShelf()
        self.given: Mapping[int, OnShelf] = {}

    def put(self, source: int, number: int, memory: torch.Tensor) -> None:
        """See :class:`phalanx.weights.transports.store_transport.Shelf`."""
        self.mine.refs[number] = self._put(memory.numpy())

    def get(self, source: int, number: int, timeout: float) -> torch.Tensor:
        """See :class:`phalanx.weights.transports.store_transport.Shelf`."""
        ref = self._of(source).refs.get(number)
        if ref is None:
            raise _missing(source, f"bucket {number}")
        try:
            stored = self._fetch(ref, timeout)
        except TimeoutError:
            raise lost(
                f"source rank {source}",
                f"bucket {number} of source rank {source} did not come out of the object store within {timeout:.1f} s",
            ) from None
        except Exception as error:  # whatever the backend says of an object whose owner, or node, is gone
            raise lost(
                f"source rank {source}",
                f"bucket {number} of source rank {source} is not in the object store any more: its process or its node "
                f"was lost ({type(error).__name__})",
            ) from error
        # Read-only memory, of which `from_numpy` would warn; nobody writes to what a source has stored.
        return torch.from_numpy(bytes_at(stored, stored.ctypes.data, stored.nbytes))

    def tell(self, source: int, target: int, note: bytes) -> None:
        """See :class:`phalanx.weights.transports.store_transport.Shelf`."""
        self.mine.notes[target] = note

    def handed_over(self) -> OnShelf:
        """What this source has put, which lives as long as those that it is given to hold it."""
        mine, self.mine = self.mine, OnShelf()
        return mine

    def told(self, source: int, target: int, timeout: float) -> bytes:
        """See :class:`phalanx.weights.transports.store_transport.Shelf`."""
        note = self._of(source).notes.get(target)
        if note is None:
            raise _missing(source, "its note")
        return note

    def _of(self, source: int) -> OnShelf:
        found = self.given.get(source)
        if found is None:
            raise _missing(source, "anything")
        return found


def _missing(source: int, what: str) -> WeightsTransferError:
    peer = f"source rank {source}"
    return lost(peer, f"{peer} has not stored {what} for this sync; sync again")
