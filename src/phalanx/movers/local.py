"""Roles of one process: values are copied from storage to storage, or the storage is shared."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence

import torch

from phalanx.errors import DeclarationError
from phalanx.movers.contract import Read, Write
from phalanx.movers.deadline import Deadline
from phalanx.transfer.buckets import Bucket
from phalanx.transfer.manifest import Manifest

__all__ = ["LocalSource", "LocalTarget", "Meeting", "share"]


class Meeting:
    """Where the two roles of a process meet. One call of a rank is source and target, or two threads are."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Read] = deque()
        self._taken = 0
        self._given = 0

    def give(self, read: Read) -> int:
        """Offer what ``read`` gives; returns the number of the offer."""
        with self._changed:
            self._waiting.append(read)
            self._given += 1
            self._changed.notify_all()
            return self._given

    def take(self, deadline: Deadline, peer: str) -> Read:
        """The next offer."""
        with self._changed:
            while not self._waiting:
                self._changed.wait(deadline.left(peer))
            return self._waiting.popleft()

    def done(self) -> None:
        """An offer that was taken has been copied."""
        with self._changed:
            self._taken += 1
            self._changed.notify_all()

    def wait(self, offer: int, deadline: Deadline, peer: str) -> None:
        """Until the offer of that number has been copied."""
        with self._changed:
            while self._taken < offer:
                self._changed.wait(deadline.left(peer))


class LocalSource:
    """A source role's end. ``wait=False`` where the same thread receives afterwards: then ``send`` only offers."""

    def __init__(self, meeting: Meeting, *, wait: bool = True) -> None:
        self._meeting = meeting
        self._wait = wait

    def send(self, buckets: Sequence[Bucket], read: Read, *, timeout: float) -> int:
        """See :class:`phalanx.movers.contract.SourceEnd`."""
        deadline = Deadline(timeout)
        if buckets:
            offer = self._meeting.give(read)
            if self._wait:
                self._meeting.wait(offer, deadline, "the target role of this process")
        return sum(bucket.nbytes for bucket in buckets)

    def close(self) -> None:
        """Nothing is held."""


class LocalTarget:
    """A target role's end."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def receive(self, buckets: Mapping[int, Sequence[Bucket]], write: Write, *, timeout: float) -> int:
        """See :class:`phalanx.movers.contract.TargetEnd`."""
        deadline = Deadline(timeout)
        written = 0
        for source, stream in buckets.items():
            read = self._meeting.take(deadline, f"source rank {source}")
            with torch.no_grad():
                for bucket in stream:
                    for slot in bucket.slots:
                        write(slot).copy_(read(slot))
                        written += slot.nbytes
            self._meeting.done()
        return written

    def close(self) -> None:
        """Nothing is held."""


def share(
    source: Mapping[str, torch.Tensor],
    target: Mapping[str, torch.nn.Parameter | torch.Tensor],
    manifests: tuple[Manifest, Manifest],
) -> None:
    """Let the target's tensors be the source's storage from now on: a sync only marks the version.

    Args:
        source, target: local tensors by name; the target's are changed to point elsewhere.
        manifests: of both; they must be equal.

    Raises:
        DeclarationError: layouts, types or names differ, so that there is something to copy.
    """
    ours, theirs = dict(manifests[0].items()), dict(manifests[1].items())
    odd = sorted(name for name, held in theirs.items() if ours.get(name) != held)
    if odd:
        raise DeclarationError(
            f"share=True needs the source's layout and types, but {', '.join(odd[:5])} differ: accept the weights "
            "without share=True, which copies"
        )
    for name in (*theirs, *(alias for alias, _ in manifests[1].ties)):
        twin = dict(manifests[1].ties).get(name, name)
        target[name].data = source[twin].detach()
