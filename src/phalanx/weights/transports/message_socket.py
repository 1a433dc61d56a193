"""The sockets between the ends of a ring: messages of one size, and file descriptors at the beginning.

A source listens on an address that the kernel chose, in the abstract namespace: no file, nothing to clean up, and no
one to race with. Only processes of the same user are let in.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from typing import NamedTuple

from phalanx.weights.transports.deadline import Deadline, lost

__all__ = ["Message", "MessageSocket", "listen", "reach"]

_FORMAT = struct.Struct("<4sqqq")
_CREDENTIALS = struct.Struct("iII")

HELLO, SEGMENT, READY, DONE, GO = b"HELO", b"SEGM", b"REDY", b"DONE", b"GOON"


class Message(NamedTuple):
    """A word of four letters and three numbers, whose meaning is the word's."""

    word: bytes
    one: int = 0
    two: int = 0
    three: int = 0


class MessageSocket:
    """One connection to a peer that has a name for messages."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        connection.setblocking(False)
        self._socket = connection
        self.peer = peer
        self._got = bytearray()

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def tell(self, message: Message) -> None:
        """Send a message; it is so small that the socket has room for it.

        Raises:
            WeightsTransferError: the peer is gone.
        """
        try:
            self._socket.sendall(_FORMAT.pack(*message))
        except OSError as error:
            raise self._gone() from error

    def read(self) -> Message | None:
        """The next message; None while there is none.

        Raises:
            WeightsTransferError: the peer is gone.
        """
        while len(self._got) < _FORMAT.size:
            try:
                more = self._socket.recv(_FORMAT.size - len(self._got))
            except BlockingIOError:
                return None
            except OSError as error:
                raise self._gone() from error
            if not more:
                raise self._gone()
            self._got += more
        text, self._got = bytes(self._got), bytearray()
        return Message(*_FORMAT.unpack(text))

    def ask(self, deadline: Deadline) -> Message:
        """The next message, waited for."""
        while (message := self.read()) is None:
            self._wait(deadline)
        return message

    def tell_bytes(self, text: bytes, fds: list[int]) -> None:
        """Send a short text with file descriptors."""
        try:
            socket.send_fds(self._socket, [struct.pack("<I", len(text)) + text], fds)
        except OSError as error:
            raise self._gone() from error

    def ask_bytes(self, deadline: Deadline) -> tuple[bytes, list[int]]:
        """A short text and the file descriptors that came with it."""
        self._wait(deadline)
        try:
            head, fds, _, _ = socket.recv_fds(self._socket, 4, 4)
            if len(head) < 4:
                raise self._gone()
            (length,) = struct.unpack("<I", head)
            text = self._socket.recv(length) if length else b""
        except OSError as error:
            raise self._gone() from error
        return text, list(fds)

    def tell_note(self, note: bytes, deadline: Deadline) -> None:
        """Send bytes of any number, as fast as the peer takes them.

        Raises:
            WeightsTransferError: the peer is gone, or did not take them in time.
        """
        left = memoryview(struct.pack("<Q", len(note)) + note)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                self._wait(deadline, select.POLLOUT)
            except OSError as error:
                raise self._gone() from error

    def ask_note(self, deadline: Deadline) -> bytes:
        """What :meth:`tell_note` sent."""
        (length,) = struct.unpack("<Q", self._exactly(8, deadline))
        return self._exactly(length, deadline)

    def _exactly(self, length: int, deadline: Deadline) -> bytes:
        got = bytearray()
        while len(got) < length:
            try:
                more = self._socket.recv(length - len(got))
            except BlockingIOError:
                self._wait(deadline)
                continue
            except OSError as error:
                raise self._gone() from error
            if not more:
                raise self._gone()
            got += more
        return bytes(got)

    def _wait(self, deadline: Deadline, event: int = select.POLLIN) -> None:
        """Until there is something to read, or room to write, or the time is over."""
        poll = select.poll()  # select() itself knows no file descriptors above 1023
        poll.register(self._socket, event)
        poll.poll(1000 * deadline.left(self.peer))

    def _gone(self) -> Exception:
        return lost(
            self.peer, f"{self.peer} went away while weights were on their way: its process or its sync ended"
        )

    def close(self) -> None:
        """End the connection: the peer sees it at once, and so does a thread of this process that waits on it."""
        with contextlib.suppress(OSError):  # the peer was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def listen() -> tuple[socket.socket, str]:
    """A socket that waits for readers, and its address as text."""
    waiting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    waiting.bind("")  # the kernel chooses
    waiting.listen(1024)
    return waiting, waiting.getsockname()[1:].decode()


def reach(address: str, peer: str, deadline: Deadline) -> MessageSocket:
    """Connect to a source.

    Raises:
        WeightsTransferError: nobody listens there, or not from here: another container or node.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(deadline.left(peer))
        connection.connect(b"\0" + address.encode())
    except OSError as error:
        connection.close()
        raise lost(
            peer,
            f"{peer} cannot be reached on this node ({error}): its process ended, or it is in another container",
        ) from error
    return MessageSocket(connection, peer)


def same_user(connection: socket.socket) -> bool:
    """Whether who connected is a process of this user."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(told)[1] == os.getuid()
