"""Buckets in Ray's object store: a small actor keeps their references until all readers have them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError

from phalanx.movers.deadline import Deadline, lost
from phalanx.wire.memory import bytes_at

__all__ = ["Board", "BoardShelf", "start_board"]

_AHEAD = 2
"""Buckets that are in the store at once: one is put while the other is read."""


class Board:
    """References by number of the bucket, and notes by reader; an actor whose calls wait for each other.

    Args:
        readers: those who read every bucket.
    """

    def __init__(self, readers: Sequence[int]) -> None:
        self._readers = frozenset(readers)
        self._held: dict[int, Any] = {}
        self._unread: dict[int, set[int]] = {}
        self._notes: dict[int, list[bytes]] = {reader: [] for reader in readers}
        self._changed = asyncio.Condition()

    async def put(self, number: int, reference: Any) -> None:
        """Keep a bucket; waits while readers are more than one behind."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._held) < _AHEAD)
            self._held[number], self._unread[number] = reference, set(self._readers)
            self._changed.notify_all()

    async def get(self, number: int) -> Any:
        """The reference of a bucket, waited for."""
        async with self._changed:
            await self._changed.wait_for(lambda: number in self._held)
            return self._held[number]

    async def taken(self, number: int, reader: int) -> None:
        """A reader has its bytes; after the last one the bucket is dropped."""
        async with self._changed:
            self._unread[number].discard(reader)
            if not self._unread[number]:
                del self._held[number], self._unread[number]
            self._changed.notify_all()

    async def tell(self, reader: int, note: bytes) -> None:
        """Keep a note for a reader."""
        async with self._changed:
            self._notes[reader].append(note)
            self._changed.notify_all()

    async def told(self, reader: int) -> bytes:
        """The next note for a reader, waited for."""
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._notes[reader]))
            return self._notes[reader].pop(0)


def start_board(name: str, readers: Sequence[int]) -> Any:
    """The actor, which lives as long as what this returns is held."""
    return ray.remote(Board).options(name=name, num_cpus=0).remote(tuple(readers))


class BoardShelf:
    """A :class:`phalanx.movers.store.Shelf` over a board.

    Args:
        board: its name.
        timeout: seconds within which a source's bucket must be on it.
        reader: the rank that reads; None for the source.
    """

    def __init__(self, board: str, timeout: float, reader: int | None = None) -> None:
        self._name = board
        self._timeout = timeout
        self._reader = reader
        self._found: Any = None

    def put(self, source: int, number: int, memory: torch.Tensor) -> None:
        """See :class:`phalanx.movers.store.Shelf`; waits for readers that are far behind."""
        # Within a list, so that Ray passes on the reference and not the bytes.
        self._ask(f"a reader of bucket {number}", "put", number, [ray.put(memory.numpy())])

    def get(self, source: int, number: int, timeout: float) -> torch.Tensor:
        """See :class:`phalanx.movers.store.Shelf`."""
        peer = f"source rank {source}"
        deadline = Deadline(timeout)
        (reference,) = self._ask(peer, "get", number, timeout=timeout)
        try:
            stored = ray.get(reference, timeout=deadline.left(peer))
        except (RayError, TimeoutError) as error:
            raise _gone(peer, timeout, error) from error
        self._ask(peer, "taken", number, self._reader)
        # Read-only memory, of which `from_numpy` would warn; `Whole` copies it.
        return torch.from_numpy(bytes_at(stored, stored.ctypes.data, stored.nbytes))

    def tell(self, source: int, target: int, note: bytes) -> None:
        """See :class:`phalanx.movers.store.Shelf`."""
        self._ask(f"target rank {target}", "tell", target, note)

    def told(self, source: int, target: int, timeout: float) -> bytes:
        """See :class:`phalanx.movers.store.Shelf`."""
        return self._ask(f"source rank {source}", "told", target, timeout=timeout)

    def _ask(self, peer: str, method: str, *args: Any, timeout: float | None = None) -> Any:
        deadline = Deadline(self._timeout if timeout is None else timeout)
        board = self._board(peer)
        try:
            return ray.get(getattr(board, method).remote(*args), timeout=deadline.left(peer))
        except (RayError, TimeoutError) as error:
            raise _gone(peer, self._timeout if timeout is None else timeout, error) from error

    def _board(self, peer: str) -> Any:
        if self._found is None:
            try:
                self._found = ray.get_actor(self._name)
            except (
                ValueError
            ) as error:  # its source started it before anybody could read, and it ends with its source
                raise _gone(peer, 0.0, error) from error
        return self._found


def _gone(peer: str, timeout: float, error: Exception) -> Exception:
    if isinstance(error, GetTimeoutError):
        return lost(peer, f"{peer} did not come within {timeout:g} s; is it in this update, and is it alive?")
    return lost(peer, f"{peer} was lost while weights were on their way ({type(error).__name__})")
