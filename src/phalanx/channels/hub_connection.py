"""Connections to a hub over ``multiprocessing.connection``, for both ends. Both ends prove that they know the key."""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
import threading
import time
from collections import deque
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, NamedTuple

_CONNECTS_WITHIN_S = 10.0
_SENT_DIRECTLY_BYTES = 64 << 10
_SEND_BUFFER_BYTES = 1 << 20
_MOST_UNSENT = 1024
_MOST_BYTES_BEFORE_AUTHENTICATION = 4096


class HubAddress(NamedTuple):
    """Host, port and key of a hub."""

    host: str
    port: int
    key: bytes


class HubConnection:
    """A connection. Unless ``may_wait``, sending never waits for the other end to read."""

    def __init__(self, sock: socket.socket, *, may_wait: bool) -> None:
        _tune(sock)
        self._may_wait = may_wait
        self._connection = Connection(sock.detach())
        self._lock, self._closing = threading.Lock(), threading.Lock()
        self._unsent: deque[bytes] = deque()
        self._writer: threading.Thread | None = None
        self._poll = select.poll()
        self._poll.register(self._connection.fileno(), select.POLLOUT)
        self._closed = False

    def accept(self, key: bytes) -> str:
        """Authenticate the hub's end, and return the name of the peer. Nothing is unpickled before.

        Raises:
            OSError, EOFError, AuthenticationError, ValueError: if the peer does not know the key.
        """
        deliver_challenge(self._connection, key)
        answer_challenge(self._connection, key)
        return self._connection.recv_bytes(_MOST_BYTES_BEFORE_AUTHENTICATION).decode()

    def introduce(self, key: bytes, name: str) -> None:
        """Authenticate the peer's end, and send its name.

        Raises:
            OSError, EOFError, AuthenticationError: if the hub does not know the key, or has too many new connections.
        """
        answer_challenge(self._connection, key)
        deliver_challenge(self._connection, key)
        self._connection.send_bytes(name.encode())

    def receive(self) -> Any:
        """Return the next message. A peer that does not read its answers is not served further.

        Raises:
            OSError, EOFError: at the end of the connection.
        """
        while len(self._unsent) > _MOST_UNSENT:
            time.sleep(0.01)
        return pickle.loads(self._connection.recv_bytes())

    def send(self, message: Any) -> None:
        """Send a message, unless the connection has ended, which the receiving thread notices."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._lock:
            # A socket that is ready takes a small message without blocking.
            at_once = self._may_wait or len(data) <= _SENT_DIRECTLY_BYTES and bool(self._poll.poll(0))
            if at_once and not self._unsent:
                with contextlib.suppress(OSError):
                    self._connection.send_bytes(data)
            elif not self._closed:
                self._unsent.append(data)
                if len(self._unsent) == 1:
                    self._writer = threading.Thread(target=self._send_unsent, name="phalanx-hub", daemon=True)
                    self._writer.start()

    def shut_down(self) -> None:
        """End the connection. Its threads stop waiting."""
        with self._closing, contextlib.suppress(OSError):  # it was closed
            sock = socket.socket(fileno=self._connection.fileno())
            try:
                sock.shutdown(socket.SHUT_RDWR)
            finally:
                sock.detach()

    def close(self) -> None:
        """End the connection, and free its descriptors once no thread sends."""
        self.shut_down()
        with self._lock:
            self._closed = True
        if self._writer is not None:
            self._writer.join()
        with self._closing:
            self._connection.close()

    def _send_unsent(self) -> None:
        while True:
            try:
                self._connection.send_bytes(self._unsent[0])
            except OSError:
                self._unsent.clear()
                return
            with self._lock:
                self._unsent.popleft()
                if not self._unsent:
                    return


def connect(address: HubAddress, name: str) -> HubConnection:
    """Return an authenticated connection. A hub with too many new connections is tried again.

    Raises:
        OSError: if no hub listens there, or it has another key.
    """
    limit = time.monotonic() + _CONNECTS_WITHIN_S
    while True:
        sock = socket.create_connection((address.host, address.port), timeout=_CONNECTS_WITHIN_S)
        sock.settimeout(None)
        connection = HubConnection(sock, may_wait=True)
        try:
            connection.introduce(address.key, name)
            return connection
        except (OSError, EOFError, AuthenticationError) as error:
            connection.close()
            if isinstance(error, AuthenticationError) or time.monotonic() > limit:
                raise ConnectionError(str(error)) from error
            time.sleep(0.05)


def _tune(sock: socket.socket) -> None:
    """Send small messages at once, and detect the loss of a node within seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
