"""Ranks of any nodes: point to point over a process group of gloo that spans both groups and belongs to nobody else.

It is made beside the default group, over a store that one process already serves, so there is no port to race for.
Gloo does not see a peer that dies in the middle of a transfer, nor one that stands still, and a wait that ran out
breaks the whole group. Therefore the two ends of a transfer first meet in the store, where they also see whether
the other one's pulse goes on and whether any rank failed; then bytes follow in pieces of a few megabytes, each of
which must come within two seconds. After any error the group is of no use and must be made anew, under another
prefix.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from phalanx.errors import WeightsTransferError
from phalanx.weights.planning.buckets import Bucket
from phalanx.weights.transports.deadline import Deadline, lost
from phalanx.weights.transports.transport_interface import Note, Read, Received, Write, fill, silent, spread

__all__ = ["GroupSource", "GroupTarget", "SpanningGroup"]

_PIECE_BYTES = 4 << 20
_PIECE_SECONDS = 2.0
_BEAT_SECONDS = 0.25
_DEAD_SECONDS = 1.75
"""Without a beat, and a peer counts as dead. Beats come from a thread that copies do not hold up."""
_PAUSES = (0.0005, 0.02)
"""Seconds between two looks into the store, growing from the first to the second."""


class SpanningGroup:
    """One rank's part of a process group of those sources and targets of a sync that have something for each other.

    Args:
        store: that all of them reach, such as the one of the rendezvous; a client of this rank's own.
        prefix: of this pair of epochs and this attempt; never used twice.
        sources, targets: ranks of both sides that are in it, in order; all of them must come.
        source, target: which of them this process is; exactly one is given.
        timeout: seconds in which all must have come.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        *,
        sources: Sequence[int],
        targets: Sequence[int],
        source: int | None = None,
        target: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        self._members = [("source", rank) for rank in sources] + [("target", rank) for rank in targets]
        self._places = {member: place for place, member in enumerate(self._members)}
        self._rank = self._places[("target", target or 0) if source is None else ("source", source)]
        self._store = PrefixStore(f"{prefix}/words", store)
        self._sync = 0
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout)
        options._devices = [gloo.create_default_device()]
        self._group: Any = gloo(PrefixStore(prefix, store), self._rank, len(self._members), options)

    @contextlib.contextmanager
    def syncing(self) -> Generator[None]:
        """While one sync goes on: this rank's pulse beats, and its failure is told to all."""
        self._store.delete_key(self._pulse(self._rank))
        self._sync += 1
        over = threading.Event()
        beat = threading.Thread(target=self._beat, args=(over, self._sync), daemon=True)
        self._store.add(self._pulse(self._rank), 1)
        beat.start()
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(Exception):  # the store may be what failed
                told = (
                    error.peer
                    if isinstance(error, WeightsTransferError) and error.peer
                    else self._named(self._rank)
                )
                self._store.set("failed", told)
            self.close()
            raise
        finally:
            over.set()
            beat.join()

    def _beat(self, over: threading.Event, sync: int) -> None:
        with contextlib.suppress(Exception):  # no pulse then: the others see that
            while not over.wait(_BEAT_SECONDS):
                self._store.add(self._pulse(self._rank, sync), 1)

    def send(self, memory: torch.Tensor, number: int, target: int, deadline: Deadline) -> None:
        """Send a bucket's bytes to a target rank."""
        self._move("send", memory, number, self._places["target", target], deadline)

    def receive(self, memory: torch.Tensor, number: int, source: int, deadline: Deadline) -> None:
        """Receive a bucket's bytes from a source rank."""
        self._move("recv", memory, number, self._places["source", source], deadline)

    def tell(self, target: int, note: bytes) -> None:
        """Leave a note for a target rank in the store."""
        store: Any = self._store  # takes bytes too, which its stubs do not say
        store.set(f"{self._sync}/note/{self._rank}>{self._places['target', target]}", note)

    def told(self, source: int, deadline: Deadline) -> bytes:
        """The note that a source left for this target rank, which comes with its last bucket."""
        peer = self._places["source", source]
        key = f"{self._sync}/note/{peer}>{self._rank}"
        pause, (_, longest) = _PAUSES[0], _PAUSES
        while not self._store.check([key]):
            self._check_failed()
            time.sleep(min(pause, deadline.left(self._named(peer))))
            pause = min(2 * pause, longest)
        note = self._store.get(key)
        self._store.delete_key(key)
        return note

    def _check_failed(self) -> None:
        if self._store.check(["failed"]):
            failed = self._store.get("failed").decode()
            raise lost(failed, f"{failed} failed, or was lost to another rank of this sync")

    def _move(self, verb: str, memory: torch.Tensor, number: int, other: int, deadline: Deadline) -> None:
        if self._group is None:
            raise lost(
                self._named(other),
                "this process group was closed, after an error or with its epoch; make another",
            )
        self._meet(number, other, deadline)
        move = getattr(self._group, verb)
        peer = self._named(other)
        try:
            for piece in [move([piece], other, 0) for piece in memory.split(_PIECE_BYTES)]:
                piece.wait(timedelta(seconds=min(_PIECE_SECONDS, deadline.left(peer))))
        except RuntimeError as error:
            raise lost(
                peer, f"{peer} went away, or stood still, while weights were on their way ({error})"
            ) from error

    def _meet(self, number: int, other: int, deadline: Deadline) -> None:
        """Until the peer is at this bucket too."""
        ours, theirs = (
            f"{self._sync}/{number}/{a}>{b}" for a, b in ((self._rank, other), (other, self._rank))
        )
        peer = self._named(other)
        self._store.set(ours, "here")
        pause, (_, longest) = _PAUSES[0], _PAUSES
        beats, since = 0, time.monotonic()
        while not self._store.check([theirs]):
            self._check_failed()
            now, count = time.monotonic(), self._count(other)
            if count != beats:
                beats, since = count, now
            elif beats and now - since > _DEAD_SECONDS:
                raise lost(peer, f"{peer} has shown no life for {now - since:.1f} s: it died or stands still")
            time.sleep(min(pause, deadline.left(peer)))
            pause = min(2 * pause, longest)
        self._store.delete_key(theirs)

    def _count(self, rank: int) -> int:
        """Beats of a rank in this sync; 0 while it is not in it."""
        key = self._pulse(rank)
        return self._store.add(key, 0) if self._store.check([key]) else 0

    def _pulse(self, rank: int, sync: int | None = None) -> str:
        return f"{sync or self._sync}/pulse/{rank}"

    def _named(self, rank: int) -> str:
        side, of_side = self._members[rank]
        return f"{side} rank {of_side}"

    def close(self) -> None:
        """End the group; its sockets close when nothing refers to its transfers any more."""
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()


class _GroupEnd:
    def __init__(self, group: SpanningGroup) -> None:
        self._group = group
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _room(self, nbytes: int) -> torch.Tensor:
        """Memory that is kept from bucket to bucket."""
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory[:nbytes]

    def close(self) -> None:
        """See :class:`phalanx.weights.transports.transport_interface.SourceEnd`."""
        self._group.close()
        self._memory = torch.empty(0, dtype=torch.uint8)


class GroupSource(_GroupEnd):
    """A source's end."""

    def send(self, buckets: Sequence[Bucket], read: Read, *, timeout: float, note: Note = silent) -> int:
        """See :class:`phalanx.weights.transports.transport_interface.SourceEnd`."""
        deadline = Deadline(timeout)
        with self._group.syncing():
            for bucket in buckets:
                memory = self._room(bucket.nbytes)
                fill(memory, bucket, read)
                for target in sorted(bucket.readers, key=lambda target: _turn(bucket, target)):
                    self._group.send(memory, bucket.number, target, deadline)
            for target in sorted({reader for bucket in buckets for reader in bucket.readers}):
                self._group.tell(target, note(target))
        return sum(bucket.nbytes * len(bucket.readers) for bucket in buckets)


class GroupTarget(_GroupEnd):
    """A target's end.

    Args:
        group: this rank's part of it.
        rank: of the target.
    """

    def __init__(self, group: SpanningGroup, rank: int) -> None:
        super().__init__(group)
        self._rank = rank

    def receive(self, buckets: Mapping[int, Sequence[Bucket]], write: Write, *, timeout: float) -> Received:
        """See :class:`phalanx.weights.transports.transport_interface.TargetEnd`."""
        deadline = Deadline(timeout)
        due = [bucket for stream in buckets.values() for bucket in stream]
        written = 0
        with self._group.syncing():
            for bucket in sorted(due, key=lambda bucket: _turn(bucket, self._rank)):
                memory = self._room(bucket.nbytes)
                self._group.receive(memory, bucket.number, bucket.source, deadline)
                written += spread(memory, bucket.slots, write)
            notes = {source: self._group.told(source, deadline) for source in buckets}
        return Received(written, notes)


def _turn(bucket: Bucket, target: int) -> tuple[int, int, int, int]:
    """One order of all transfers for all ranks, so that no two wait for each other; neighbours in it share no rank."""
    return bucket.number, bucket.source ^ target, bucket.source, target
