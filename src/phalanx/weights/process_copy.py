"""Roles of a process: values are copied from storage to storage, or the storage is shared."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from phalanx.errors import DeclarationError
from phalanx.weights.bucket_packing import Read, Write
from phalanx.weights.buckets import Bucket
from phalanx.weights.manifest import Manifest
from phalanx.weights.transport import Deadline, Endpoint, Note, Received, lost

_Offer = tuple[Read, bytes, Callable[[], None]]
_offers: dict[tuple[str, int, int], queue.SimpleQueue[_Offer | None]] = {}
"""Queues between roles of this process, by connection key, source rank and target rank."""


class CopyEndpoint(Endpoint):
    """The end of a source or target role.

    A source only offers its tensors, since the same thread may receive afterwards. The target copies them, and then
    calls ``check``, which raises if they were written to meanwhile.

    Args:
        key: key of the connection.
        pairs: (source rank, target rank) of each pair that this role is part of.
        check: raises WeightsError if the source's tensors were written to.
    """

    def __init__(self, key: str, pairs: Iterable[tuple[int, int]], check: Callable[[], None]) -> None:
        self._keys = [(key, *pair) for pair in pairs]
        self._queues = {pair: _offers.setdefault(pair, queue.SimpleQueue()) for pair in self._keys}
        self._check = check

    def send(self, buckets: Sequence[Bucket], read: Read, note: Note, deadline: Deadline) -> int:
        for (_, _, reader), offers in self._queues.items():
            offers.put((read, note(reader), self._check))
        return sum(bucket.nbytes for bucket in buckets)

    def receive(self, buckets: Mapping[int, Sequence[Bucket]], write: Write, deadline: Deadline) -> Received:
        written, notes = 0, dict[int, bytes]()
        for (_, source, _), offers in self._queues.items():
            read, notes[source], check = self._take(offers, f"source rank {source}", deadline)
            with torch.no_grad():
                for bucket in buckets[source]:
                    for slot in bucket.slots:
                        write(slot).copy_(read(slot))
                        written += slot.nbytes
            check()
        return Received(written, notes)

    def _take(self, offers: queue.SimpleQueue[_Offer | None], peer: str, deadline: Deadline) -> _Offer:
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


def share_storage(
    source: Mapping[str, torch.Tensor],
    target: Mapping[str, torch.nn.Parameter | torch.Tensor],
    manifests: tuple[Manifest, Manifest],
) -> None:
    """Make the target's tensors views of the source's storage: a sync then only marks the version.

    Args:
        source, target: local tensors by name. The target's tensors are changed.
        manifests: manifests of both.

    Raises:
        DeclarationError: if layouts, types or names differ, so that a copy is needed.
    """
    ours, theirs = dict(manifests[0].items()), dict(manifests[1].items())
    odd = sorted(name for name, tensor in theirs.items() if ours.get(name) != tensor)
    if odd:
        raise DeclarationError(
            f"share=True needs the source's layout and types, but {', '.join(odd[:5])} differ: accept the weights "
            "without share=True, which copies"
        )
    ties = dict(manifests[1].ties)
    for name in (*theirs, *ties):
        target[name].data = source[ties.get(name, name)].detach()
