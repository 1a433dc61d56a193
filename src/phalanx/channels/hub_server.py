"""Serves a hub to other processes over ``multiprocessing.connection``: a thread for each connection.

A connection stands for the process at its other end: the end of the connection is the death of that process. Nothing
is unpickled before both sides have proved that they know the key of the hub.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import secrets
import select
import socket
import threading
import time
from collections import deque
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, NamedTuple

from phalanx.channels.hub import Hub

_CONNECTS_WITHIN_S = 10.0
_AUTHENTICATES_WITHIN_S = 10.0
_MOST_UNAUTHENTICATED = 64
_SENT_DIRECTLY_BYTES = 64 << 10
_SEND_BUFFER_BYTES = 1 << 20
_MOST_UNSENT = 1024
_MOST_NAME_BYTES = 4096
_log = logging.getLogger("phalanx")


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
        self._lock = threading.Lock()
        self._unsent: deque[bytes] = deque()
        self._poll = select.poll()
        self._poll.register(self._connection.fileno(), select.POLLOUT)

    def accept(self, key: bytes) -> str:
        """Authenticate the hub's end, and return the name of the peer. Nothing is unpickled before.

        Raises:
            OSError, EOFError, AuthenticationError, ValueError: if the peer does not know the key.
        """
        deliver_challenge(self._connection, key)
        answer_challenge(self._connection, key)
        return self._connection.recv_bytes(_MOST_NAME_BYTES).decode()

    def introduce(self, key: bytes, name: str) -> None:
        """Authenticate the peer's end, and send its name.

        Raises:
            OSError, EOFError, AuthenticationError: if the hub does not know the key.
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
            is_small = len(data) <= _SENT_DIRECTLY_BYTES
            if not self._unsent and (self._may_wait or (is_small and self._poll.poll(0))):
                with contextlib.suppress(OSError):
                    self._connection.send_bytes(data)
            else:
                self._unsent.append(data)
                if len(self._unsent) == 1:
                    threading.Thread(target=self._send_unsent, name="phalanx-hub", daemon=True).start()

    def close(self) -> None:
        """End the connection: its threads stop waiting. Its descriptors are freed with the last reference."""
        descriptor = os.dup(self._connection.fileno())
        with socket.socket(fileno=descriptor) as sock, contextlib.suppress(OSError):  # the peer has ended it
            sock.shutdown(socket.SHUT_RDWR)

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
    """Return an authenticated connection, once the hub has capacity for it.

    Raises:
        OSError: if no hub listens there, or it has another key.
    """
    sock = socket.create_connection((address.host, address.port), timeout=_CONNECTS_WITHIN_S)
    sock.settimeout(None)
    connection = HubConnection(sock, may_wait=True)
    try:
        connection.introduce(address.key, name)
    except (OSError, EOFError, AuthenticationError) as error:
        connection.close()
        raise ConnectionError(str(error)) from error
    return connection


def _tune(sock: socket.socket) -> None:
    """Send small messages at once, and detect the loss of a node within seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class HubServer:
    """Accepts connections to a hub until it is stopped."""

    def __init__(self, hub: Hub, host: str) -> None:
        self._hub = hub
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family, backlog=1024)
        self.address = HubAddress(host, self._listening.getsockname()[1], secrets.token_bytes(32))
        self._unauthenticated = threading.BoundedSemaphore(_MOST_UNAUTHENTICATED)
        threading.Thread(target=self._accept, name="phalanx-hub", daemon=True).start()

    def stop(self) -> None:
        """Accept no more connections. Existing connections are served until their peers end."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        """Accept connections. While too many are not authenticated, others wait in the backlog."""
        while True:
            self._unauthenticated.acquire()
            try:
                sock, _ = self._listening.accept()
            except OSError:
                self._unauthenticated.release()
                if self._listening.fileno() < 0:
                    return
                time.sleep(0.1)  # out of descriptors: connections that end free some
            else:
                threading.Thread(target=self._serve, args=(sock,), name="phalanx-hub", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        connection = HubConnection(sock, may_wait=False)
        name = self._authenticate(connection)
        if name is not None:
            self._hub.connect(name, lambda *message: connection.send(message))
            try:
                while True:
                    self._hub.execute(name, connection.receive())
            except (OSError, EOFError):
                pass
            except Exception:
                _log.warning("a message of %s is damaged; it is disconnected", name, exc_info=True)
            self._hub.peer_died(name, "its process ended")
        connection.close()

    def _authenticate(self, connection: HubConnection) -> str | None:
        """Return the name of the peer, None if it does not know the key or does not prove it in time."""
        deadline = threading.Timer(_AUTHENTICATES_WITHIN_S, connection.close)
        deadline.daemon = True
        deadline.start()
        try:
            return connection.accept(self.address.key)
        except (OSError, EOFError, AuthenticationError, ValueError, AssertionError):
            return None
        finally:
            deadline.cancel()
            self._unauthenticated.release()


_served: list[HubServer] = []


def start_hub(host: str) -> HubAddress:
    """Serve a hub of this process, which does nothing else."""
    _served.append(HubServer(Hub(), host))
    return _served[0].address
