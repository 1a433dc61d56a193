"""Roles of one process: values are copied from storage to storage, or the storage is shared."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence

import torch

from phalanx.errors import DeclarationError
from phalanx.weights.planning.buckets import Bucket
from phalanx.weights.planning.shard_manifest import Manifest
from phalanx.weights.transports.deadline import Deadline, lost
from phalanx.weights.transports.transport_interface import Note, Read, Received, Write, silent

__all__ = ["LocalSource", "LocalTarget", "Meeting", "share"]


class Meeting:
    """Where the two roles of a process meet. One call of a rank is source and target, or two threads are."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Read, bytes]] = deque()
        self._taken = 0
        self._given = 0
        self._over = False

    def give(self, read: Read, note: bytes = b"") -> int:
        """Offer what ``read`` gives; returns the number of the offer."""
        with self._changed:
            self._waiting.append((read, note))
            self._given += 1
            self._changed.notify_all()
            return self._given

    def take(self, deadline: Deadline, peer: str) -> tuple[Read, bytes]:
        """The next offer, with its note."""
        with self._changed:
            while not self._waiting:
                self._wait_for(peer, deadline)
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
                self._wait_for(peer, deadline)

    def end(self) -> None:
        """One of the two is gone: who waits for it, or comes to wait, hears so at once."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _wait_for(self, peer: str, deadline: Deadline) -> None:
        if self._over:
            raise lost(peer, f"{peer}, a role of this process, has ended its part of the sync; sync again")
        self._changed.wait(deadline.left(peer))


class LocalSource:
    """A source role's end.

    Args:
        meetings: with each target rank of this process.
        wait: False where the same thread receives afterwards: then ``send`` only offers.
    """

    def __init__(self, meetings: Mapping[int, Meeting], *, wait: bool = True) -> None:
        self._meetings = meetings
        self._wait = wait

    def send(self, buckets: Sequence[Bucket], read: Read, *, timeout: float, note: Note = silent) -> int:
        """See :class:`phalanx.weights.transports.transport_interface.SourceEnd`."""
        deadline = Deadline(timeout)
        readers = sorted({reader for bucket in buckets for reader in bucket.readers})
        offers = [(reader, self._meetings[reader].give(read, note(reader))) for reader in readers]
        for reader, offer in offers if self._wait else ():
            self._meetings[reader].wait(offer, deadline, f"target rank {reader}")
        return sum(bucket.nbytes for bucket in buckets)

    def close(self) -> None:
        """Nothing is held; who waits for this end hears that it is gone."""
        for meeting in self._meetings.values():
            meeting.end()


class LocalTarget:
    """A target role's end: ``meetings`` with each source rank of this process."""

    def __init__(self, meetings: Mapping[int, Meeting]) -> None:
        self._meetings = meetings

    def receive(self, buckets: Mapping[int, Sequence[Bucket]], write: Write, *, timeout: float) -> Received:
        """See :class:`phalanx.weights.transports.transport_interface.TargetEnd`."""
        deadline = Deadline(timeout)
        written, notes = 0, dict[int, bytes]()
        for source, stream in buckets.items():
            read, notes[source] = self._meetings[source].take(deadline, f"source rank {source}")
            with torch.no_grad():
                for bucket in stream:
                    for slot in bucket.slots:
                        write(slot).copy_(read(slot))
                        written += slot.nbytes
            self._meetings[source].done()
        return Received(written, notes)

    def close(self) -> None:
        """Nothing is held; who waits for this end hears that it is gone."""
        for meeting in self._meetings.values():
            meeting.end()


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
