"""Ranks of one node: a source fills a ring of segments, its targets read them, and sockets say what is ready.

Segments are made once and kept from sync to sync: first touch of a page costs three to four writes of it. A target
serves whichever source is ready, so that targets that share sources never wait for each other crosswise.
"""

from __future__ import annotations

import selectors
from collections.abc import Iterable, Mapping, Sequence

from phalanx.errors import WeightsTransferError
from phalanx.weights.planning.buckets import Bucket
from phalanx.weights.transports.bucket_packing import PLAIN, Packing
from phalanx.weights.transports.deadline import Deadline, lost
from phalanx.weights.transports.message_socket import (
    DONE,
    HELLO,
    READY,
    SEGMENT,
    Message,
    MessageSocket,
    listen,
    reach,
    same_user,
)
from phalanx.weights.transports.segments import Segment, SegmentKind, host_segments
from phalanx.weights.transports.transport_interface import Note, Read, Received, Write, silent

__all__ = ["RingSource", "RingTarget"]


class RingSource:
    """A source's ring.

    Args:
        rank: of the source, for messages.
        bucket_bytes: size of a segment, that of the largest bucket as it is packed.
        segments: how many; with two, one is filled while the other is read.
        kind: whose memory.
        packing: how buckets lie in it; the targets'.
    """

    def __init__(
        self,
        rank: int,
        bucket_bytes: int,
        *,
        segments: int = 2,
        kind: SegmentKind = host_segments,
        packing: Packing = PLAIN,
    ) -> None:
        self._name = f"source rank {rank}"
        self._bucket_bytes = bucket_bytes
        self._packing = packing
        self._waiting, self.address = listen()
        self._ring: list[Segment] = [kind.make(bucket_bytes) for _ in range(segments)]
        self._readers: dict[int, MessageSocket] = {}
        self._sync = 0

    def send(self, buckets: Sequence[Bucket], read: Read, *, timeout: float, note: Note = silent) -> int:
        """See :class:`phalanx.weights.transports.transport_interface.SourceEnd`."""
        deadline = Deadline(timeout)
        self._sync += 1
        unread: dict[int, set[int]] = {}
        packed = 0
        try:
            self._gather({reader for bucket in buckets for reader in bucket.readers}, deadline)
            for bucket in buckets:
                turn = bucket.number % len(self._ring)
                self._settle(
                    unread, {number for number in unread if number % len(self._ring) == turn}, deadline
                )
                length = self._packing.pack(self._ring[turn].memory, bucket, read)
                packed += length
                self._ring[turn].settle()
                unread[bucket.number] = set(bucket.readers)
                for reader in bucket.readers:
                    self._readers[reader].tell(Message(READY, self._sync, bucket.number, length))
                self._hear(unread, 0.0)
            for reader in sorted({reader for bucket in buckets for reader in bucket.readers}):
                self._readers[reader].tell_note(note(reader), deadline)
            self._settle(unread, set(unread), deadline)
        except BaseException:
            self._hang_up()
            raise
        return packed

    def _gather(self, wanted: set[int], deadline: Deadline) -> None:
        """Wait for the readers that are not connected yet."""
        while missing := wanted - self._readers.keys():
            with selectors.DefaultSelector() as selector:
                selector.register(self._waiting, selectors.EVENT_READ)
                for wire in self._readers.values():
                    selector.register(wire, selectors.EVENT_READ, wire)
                ready = selector.select(deadline.left(f"target rank {min(missing)}"))
            for key, _ in ready:
                if key.data is not None:
                    key.data.read()  # nothing is due from a reader now, but its end would be found here
                else:
                    self._accept(deadline)

    def _accept(self, deadline: Deadline) -> None:
        connection, _ = self._waiting.accept()
        if same_user(connection):
            self._welcome(MessageSocket(connection, "a target rank"), deadline)
        else:
            connection.close()

    def _welcome(self, wire: MessageSocket, deadline: Deadline) -> None:
        """Learn who it is, and give it the ring. Who went before saying that is forgotten."""
        try:
            hello = wire.ask(deadline)
        except WeightsTransferError:
            wire.close()
            return
        wire.peer = f"target rank {hello.one}"
        try:
            wire.tell(Message(SEGMENT, len(self._ring), self._bucket_bytes, self._sync))
            for segment in self._ring:
                wire.tell_bytes(*segment.handle())
        except WeightsTransferError:
            wire.close()
            raise
        old = self._readers.pop(hello.one, None)
        if old is not None:
            old.close()
        self._readers[hello.one] = wire

    def _settle(self, unread: dict[int, set[int]], numbers: set[int], deadline: Deadline) -> None:
        """Until all readers have what is in the buckets of these numbers."""
        while any(unread.get(number) for number in numbers):
            late = min(reader for number in numbers for reader in unread.get(number, ()))
            self._hear(unread, deadline.left(f"target rank {late}"))

    def _hear(self, unread: dict[int, set[int]], timeout: float) -> None:
        """Take the readers' answers; wait for one, but not longer than ``timeout``."""
        with selectors.DefaultSelector() as selector:
            for reader in {reader for readers in unread.values() for reader in readers}:
                selector.register(self._readers[reader], selectors.EVENT_READ, reader)
            ready = selector.select(timeout)
        for key, _ in ready:
            wire = self._readers[key.data]
            # Not further than the last bucket: a reader that has everything may close its end.
            while self._reads(unread, key.data) and (message := wire.read()) is not None:
                if message[:2] != (DONE, self._sync):
                    raise lost(wire.peer, f"{wire.peer} answered for another sync: {message}")
                unread[message.two].discard(key.data)

    def _reads(self, unread: Mapping[int, set[int]], reader: int) -> bool:
        return any(reader in readers for readers in unread.values())

    def _hang_up(self) -> None:
        for wire in self._readers.values():
            wire.close()
        self._readers = {}

    def close(self) -> None:
        """See :class:`phalanx.weights.transports.transport_interface.SourceEnd`."""
        self._hang_up()
        self._waiting.close()
        for segment in self._ring:
            segment.close()
        self._ring = []


class _Link:
    """A target's connection to one source, with that source's ring."""

    def __init__(self, wire: MessageSocket, ring: list[Segment]) -> None:
        self.wire = wire
        self.ring = ring

    def close(self) -> None:
        self.wire.close()
        for segment in self.ring:
            segment.close()


class RingTarget:
    """A target's end of the rings of its sources.

    Args:
        rank: of the target.
        addresses: of the rings, by source rank.
        kind: whose memory; the sources' kind.
        packing: how buckets lie in it.
    """

    def __init__(
        self,
        rank: int,
        addresses: Mapping[int, str],
        *,
        kind: SegmentKind = host_segments,
        packing: Packing = PLAIN,
    ) -> None:
        self._rank = rank
        self._addresses = dict(addresses)
        self._kind = kind
        self._packing = packing
        self._links: dict[int, _Link] = {}
        self._called: dict[int, MessageSocket] = {}

    def connect(self, sources: Iterable[int], *, timeout: float) -> None:
        """Connect to sources before there is anything to receive, so that they hear when this end is closed."""
        self._call_all(sources, Deadline(timeout))

    def receive(self, buckets: Mapping[int, Sequence[Bucket]], write: Write, *, timeout: float) -> Received:
        """See :class:`phalanx.weights.transports.transport_interface.TargetEnd`."""
        deadline = Deadline(timeout)
        expected = {source: {one.number: one for one in stream} for source, stream in buckets.items()}
        written = 0
        try:
            self._call_all(expected, deadline)
            while self._called:
                source, wire = self._called.popitem()
                self._links[source] = self._open(wire, deadline)
            while any(expected.values()):
                for source in self._ready(expected, deadline):
                    written += self._take(source, expected[source], write)
            notes = {source: self._links[source].wire.ask_note(deadline) for source in buckets}
        except BaseException:
            self.close()
            raise
        return Received(written, notes)

    def _call_all(self, sources: Iterable[int], deadline: Deadline) -> None:
        """Connect to those that there is no connection to yet."""
        for source in sorted(set(sources) - self._links.keys() - self._called.keys()):
            wire = self._called[source] = reach(self._addresses[source], f"source rank {source}", deadline)
            wire.tell(Message(HELLO, self._rank))

    def _open(self, wire: MessageSocket, deadline: Deadline) -> _Link:
        ring: list[Segment] = []
        try:
            _, count, nbytes, _ = wire.ask(deadline)
            while len(ring) < count:
                ring.append(self._kind.open(nbytes, *wire.ask_bytes(deadline)))
        except BaseException:
            _Link(wire, ring).close()
            raise
        return _Link(wire, ring)

    def _ready(self, expected: Mapping[int, Mapping[int, Bucket]], deadline: Deadline) -> list[int]:
        """Sources that have something to say; their end is something too."""
        waiting = [source for source, numbers in expected.items() if numbers]
        with selectors.DefaultSelector() as selector:
            for source in waiting:
                selector.register(self._links[source].wire, selectors.EVENT_READ, source)
            return [key.data for key, _ in selector.select(deadline.left(f"source rank {waiting[0]}"))]

    def _take(self, source: int, expected: dict[int, Bucket], write: Write) -> int:
        """Read every bucket that this source has ready."""
        link = self._links[source]
        written = 0
        while expected and (message := link.wire.read()) is not None:
            bucket = expected.pop(message.two, None)
            if message.word != READY or bucket is None:
                raise lost(
                    link.wire.peer,
                    f"{link.wire.peer} sent {message}, which is no bucket of this plan for this rank",
                )
            segment = link.ring[bucket.number % len(link.ring)]
            written += self._packing.unpack(segment.memory[: message.three], bucket.slots, write)
            segment.settle()
            link.wire.tell(Message(DONE, message.one, message.two))
        return written

    def close(self) -> None:
        """See :class:`phalanx.weights.transports.transport_interface.TargetEnd`."""
        for wire in self._called.values():
            wire.close()
        for link in self._links.values():
            link.close()
        self._called, self._links = {}, {}
