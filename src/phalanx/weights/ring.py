"""The transport between ranks of a node: a source fills a ring of two memory segments, and its targets read them.

Sockets report which segment is ready. The ring is in host memory or, for ranks on a CUDA device or on devices that can
access each other, in device memory. It is allocated once and kept from sync to sync: the first write of a page costs
three to four times a later write. A target serves any source that is ready, so that targets that share sources never
wait for each other in a cycle.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from phalanx.errors import WeightsTransferError
from phalanx.weights.buckets import SlotView
from phalanx.weights.shared_memory import DeviceMemory, HostMemory, memory_on
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


class RingAddress(NamedTuple):
    """Address of a source's ring: socket, bytes of a segment, and handle of the memory."""

    socket: bytes
    nbytes: int
    handle: bytes


class RingSender(Endpoint):
    """The endpoint of a source, with a ring on its device.

    The source listens on an address that the kernel chose, in the abstract namespace: there is no file to clean up.
    Only processes of the same user are accepted.
    """

    def __post_init__(self) -> None:
        self._nbytes = nbytes = -(-self.capacity // 64) * 64
        self._memory = memory_on(self.device).create(nbytes * _SEGMENTS, self.device)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("")
        self._listener.listen(1024)
        self.address = RingAddress(self._listener.getsockname(), nbytes, self._memory.handle)
        self._readers: dict[int, PeerConnection] = {}

    def send(self, version: Outgoing, deadline: Deadline) -> int:
        while missing := set(self.readers) - self._readers.keys():
            self._accept(f"target rank {min(missing)}", deadline)
        if self.packing.varies:
            self.packing.agree([self._readers[reader].receive(deadline) for reader in self.readers])
        unread: dict[int, set[int]] = {}
        sent = 0
        for bucket in self.buckets:
            self._wait_until_read(unread, bucket.number - _SEGMENTS, deadline)
            begin = bucket.number % _SEGMENTS * self._nbytes
            segment = self._memory.tensor[begin : begin + self._nbytes]
            length = self.packing.pack(segment, bucket, version.read)
            self._memory.synchronize()
            sent += length
            unread[bucket.number] = set(bucket.readers)
            for reader in bucket.readers:
                self._readers[reader].send((bucket.number, length), deadline)
        for reader in self.readers:
            self._readers[reader].send(version.note(reader), deadline)
        self._wait_until_read(unread, max(unread), deadline)
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

    def _wait_until_read(self, unread: dict[int, set[int]], last: int, deadline: Deadline) -> None:
        """Wait until all readers have read the buckets up to number ``last``."""
        while late := {reader for number, readers in unread.items() if number <= last for reader in readers}:
            # other readers may be ahead, but a reader that has everything may close its end
            waiting: Any = [self._readers[reader] for reader in set().union(*unread.values())]
            ready: Any = wait(waiting, deadline.left(f"target rank {min(late)}"))
            for reader in ready:
                rank, number = reader.receive(deadline)
                unread[number].discard(rank)

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
            peer, address = f"source rank {source}", self.request.addresses[source]
            handle, total = address.handle, address.nbytes * _SEGMENTS
            connecting = socket.socket(socket.AF_UNIX)
            try:
                connecting.settimeout(deadline.left(peer))
                connecting.connect(address.socket)
                self._rings[source] = memory_on(self.device).open(handle, total, self.device)
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
        for connection in self._sources.values() if self.packing.varies else ():
            connection.send(self.packing.known, deadline)
        expected = {
            source: {bucket.number: bucket for bucket in stream} for source, stream in self.streams.items()
        }
        while waiting := {self._sources[source]: source for source in expected if expected[source]}:
            connections: Any = list(waiting)
            ready: Any = wait(connections, deadline.left(connections[0].peer))
            for connection in ready:
                source = waiting[connection]
                number, length = connection.receive(deadline)
                begin, ring = number % _SEGMENTS * self.request.addresses[source].nbytes, self._rings[source]
                slots = expected[source].pop(number).slots
                try:
                    self.packing.unpack(ring.tensor[begin : begin + length], slots, write)
                    ring.synchronize()
                except RuntimeError:  # of a device, perhaps since the source has ended and freed the memory
                    connection.send((self.rank, number), deadline)  # then this raises
                    raise
                connection.send((self.rank, number), deadline)
        return {source: connection.receive(deadline) for source, connection in self._sources.items()}

    def close(self) -> None:
        ends = [*self._sources.values(), *self._rings.values()]
        self._sources, self._rings = {}, {}
        for end in ends:
            end.close()
