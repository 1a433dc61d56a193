"""Roles of a process: values are copied from storage to storage."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence

import torch

from phalanx.weights.buckets import Bucket, Packing, SlotView
from phalanx.weights.transport import COPY, Deadline, Endpoint, Note, Side, lost

_Offer = tuple[SlotView, bytes, Callable[[], None]]
_Offers = queue.SimpleQueue[_Offer | None]
_offers: dict[tuple[str, int, int], _Offers] = {}
"""Queues between roles of this process, by connection, source rank and target rank."""


class CopyEndpoint(Endpoint):
    """The end of a source or target role.

    A source only offers its tensors, since the same thread may receive afterwards. The target copies them, and then
    calls ``check``, which raises if they were written to meanwhile.

    Args:
        connection: name of the connection.
        side, rank: the role.
        streams: see :class:`Endpoint`.
        check: raises WeightsError if the source's tensors were written to.
    """

    def __init__(
        self,
        connection: str,
        side: Side,
        rank: int,
        streams: Mapping[int, Sequence[Bucket]],
        check: Callable[[], None],
    ) -> None:
        super().__init__(COPY, streams, Packing())
        self._check = check
        peers = {reader for bucket in self.buckets for reader in bucket.readers}
        keys = [(connection, rank, peer) for peer in sorted(peers)]
        if side == "target":
            keys = [(connection, source, rank) for source in streams]
        self._queues = {key: _offers.setdefault(key, queue.SimpleQueue()) for key in keys}

    def send(self, read: SlotView, note: Note, deadline: Deadline) -> int:
        for (_, _, reader), offers in self._queues.items():
            offers.put((read, note(reader), self._check))
        return sum(bucket.nbytes for bucket in self.buckets)

    def receive(self, write: SlotView, deadline: Deadline) -> dict[int, bytes]:
        notes: dict[int, bytes] = {}
        for (_, source, _), offers in self._queues.items():
            read, notes[source], check = self._take(offers, f"source rank {source}", deadline)
            with torch.no_grad():
                for bucket in self.streams[source]:
                    for slot in bucket.slots:
                        write(slot).copy_(read(slot))
            check()
        return notes

    def _take(self, offers: _Offers, peer: str, deadline: Deadline) -> _Offer:
        while True:
            try:
                offer = offers.get(timeout=deadline.left(peer))
            except queue.Empty:
                continue  # the deadline raises
            if offer is None:
                raise lost(peer, f"{peer}, a role of this process, ended its part of the sync; sync again")
            return offer

    def close(self) -> None:
        for key, offers in self._queues.items():
            offers.put(None)  # wakes a target that waits
            _offers.pop(key, None)
