"""The transport between ranks of a node: a source fills a ring of two memory segments, and its targets read them.

Sockets report which segment is ready. The ring is in host memory or, for ranks on a CUDA device or on devices that can
access each other, in device memory. It is allocated once and kept from sync to sync: the first write of a page costs
three to four times a later write. A target serves any source that is ready, so that targets that share sources never
wait for each other in a cycle.

A target with tensors in host memory of this library, for a ``load`` function, sends their location if it is the only
reader of its buckets. Sources then write to its tensors, without the ring. They wait until the target receives, since
it may still load the version before.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import socket
import struct
from multiprocessing.connection import Connection, wait
from typing import Any

from phalanx.errors import WeightsTransferError
from phalanx.weights.buckets import Bucket, SlotView, copy_slots, write_slot
from phalanx.weights.shared_memory import DeviceMemory, HostMemory, memory_on, open_tensors
from phalanx.weights.transport_interface import Deadline, Endpoint, Outgoing, lost

_CONNECT_S = 60.0
_SEGMENTS = 2
"""One segment is filled while the other is read."""
_CREDENTIALS = struct.Struct("iII")


class PeerConnection:
    """A connection to a rank of this node, for small objects."""

    def __init__(self, connected: socket.socket, peer: str) -> None:
        connected.setblocking(True)
        self._socket = connected
        self._connection: Connection[Any, Any] = Connection(os.dup(connected.fileno()))
        self.peer = peer

    def fileno(self) -> int:
        """Return the file descriptor to wait for."""
        return self._connection.fileno()

    def send(self, message: object, deadline: Deadline) -> None:
        """Send a message.

        Raises:
            WeightsTransferError: if the peer ended the connection, or did not read in time.
        """
        left = deadline.left(self.peer)
        limit = struct.pack("ll", int(left), int(left % 1 * 1e6))
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._connection.send(message)
        except OSError as error:
            deadline.left(self.peer)
            raise self._ended() from error

    def receive(self, deadline: Deadline) -> Any:
        """Wait for a message and return it.

        Raises:
            WeightsTransferError: if the peer ended the connection, or sent nothing in time.
        """
        try:
            while not self._connection.poll(deadline.left(self.peer)):
                pass  # the deadline raises
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error

    def _ended(self) -> Exception:
        problem = "ended the connection while weights were sent: its process or its sync ended"
        return lost(self.peer, f"{self.peer} {problem}")

    def close(self) -> None:
        """End the connection. The peer notices at once, and so does a thread of this process that waits for it."""
        with contextlib.suppress(OSError):  # the peer has ended it already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with contextlib.suppress(OSError):
            self._connection.close()


class RingSender(Endpoint):
    """The endpoint of a source, with a ring on its device.

    The source listens on an address that the kernel chose, in the abstract namespace: there is no file to clean up.
    Only processes of the same user are accepted.
    """

    def __post_init__(self) -> None:
        self._segment_bytes = -(-self.capacity // 64) * 64
        nbytes = self._segment_bytes * _SEGMENTS
        self._memory = memory_on(self.device).create(nbytes, self.device)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("")
        self._listener.listen(1024)
        self.address = self._listener.getsockname(), nbytes, self._memory.handle
        self._readers: dict[int, PeerConnection] = {}
        self._opened = functools.cache(open_tensors)  # once, and not in every sync

    def send(self, version: Outgoing, deadline: Deadline) -> int:
        while missing := set(self.readers) - self._readers.keys():
            self._accept(f"target rank {min(missing)}", deadline)
        greetings = [self._readers[reader].receive(deadline) for reader in self.readers]
        self.packing.agree(known for known, *_ in greetings)
        written = {readers: self._opened(location) for _, readers, location in greetings if location}
        unread: set[tuple[int, PeerConnection]] = set()
        sent = 0
        for bucket in self.buckets:
            if bucket.readers in written:
                write = functools.partial(write_slot, written[bucket.readers])
                copy_slots(bucket.slots, version.read, write)
                sent += bucket.nbytes
                continue
            self._wait_until_read(unread, bucket.number - _SEGMENTS, deadline)
            begin = bucket.number % _SEGMENTS * self._segment_bytes
            segment = self._memory.tensor[begin : begin + self._segment_bytes]
            length = self.packing.pack(segment, bucket, version.read)
            self._memory.synchronize()
            sent += length
            for reader in bucket.readers:
                unread.add((bucket.number, self._readers[reader]))
                self._readers[reader].send((begin, begin + length), deadline)
        for reader in self.readers:
            self._readers[reader].send(version.note(reader), deadline)
        self._wait_until_read(unread, math.inf, deadline)
        return sent

    def _accept(self, peer: str, deadline: Deadline) -> None:
        """Accept a target that connects before the deadline. The error of a timeout names ``peer``."""
        self._listener.settimeout(deadline.left(peer))
        try:
            connected, _ = self._listener.accept()
        except TimeoutError:
            return  # the deadline raises
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
            connected.close()
            return
        reader = PeerConnection(connected, "a target rank")
        rank = reader.receive(deadline)
        reader.peer = f"target rank {rank}"
        self._readers[rank] = reader

    def _wait_until_read(
        self, unread: set[tuple[int, PeerConnection]], last: float, deadline: Deadline
    ) -> None:
        """Wait until all readers have read the buckets up to number ``last``."""
        while late := [reader for number, reader in unread if number <= last]:
            # other readers may be ahead, but a reader that has everything may close its end
            waiting: Any = {reader for _, reader in unread}
            ready: Any = wait(waiting, deadline.left(late[0].peer))
            for reader in ready:
                unread.discard((reader.receive(deadline), reader))

    def close(self) -> None:
        readers, self._readers = self._readers, {}
        for reader in readers.values():
            reader.close()
        self._listener.close()
        self._memory.close()


class RingReceiver(Endpoint):
    """The endpoint of a target. It connects when it is created, so that a path that cannot be used is found."""

    def __post_init__(self) -> None:
        self._sources: dict[int, PeerConnection] = {}
        self._rings: dict[int, HostMemory | DeviceMemory] = {}
        deadline = Deadline(_CONNECT_S)
        for source in self.streams:
            peer, (address, nbytes, handle) = f"source rank {source}", self.request.addresses[source]
            connecting = socket.socket(socket.AF_UNIX)
            try:
                connecting.settimeout(deadline.left(peer))
                connecting.connect(address)
                self._rings[source] = memory_on(self.device).open(handle, nbytes, self.device)
                self._sources[source] = PeerConnection(connecting, peer)
                self._sources[source].send(self.rank, deadline)
            except BaseException as error:
                connecting.close()
                with contextlib.suppress(Exception):  # the first error tells the cause
                    self.close()
                if not isinstance(error, OSError | WeightsTransferError):
                    raise
                problem = f"{peer} cannot be reached on this node ({error})"
                raise lost(peer, f"{problem}: its process ended, or it is in another container") from error

    def receive(self, write: SlotView, deadline: Deadline) -> dict[int, bytes]:
        for connection in self._sources.values():
            connection.send((self.packing.known, (self.rank,), self.location), deadline)
        expected: dict[Any, list[Bucket]] = {
            self._sources[source]: [] if self.location else [*stream]
            for source, stream in self.streams.items()
        }
        while waiting := [connection for connection, stream in expected.items() if stream]:
            ready: Any = wait(waiting, deadline.left(waiting[0].peer))
            for connection in ready:
                begin, end = connection.receive(deadline)
                bucket = expected[connection].pop(0)
                ring = self._rings[bucket.source]
                try:
                    self.packing.unpack(ring.tensor[begin:end], bucket.slots, write)
                    ring.synchronize()
                finally:  # raises if a device failed since the source has ended and freed the memory
                    connection.send(bucket.number, deadline)
        return {source: connection.receive(deadline) for source, connection in self._sources.items()}

    def close(self) -> None:
        ends = [*self._sources.values(), *self._rings.values()]
        self._sources, self._rings = {}, {}
        for end in ends:
            end.close()
