"""Serves a hub to other processes over ``multiprocessing.connection``: a thread for each connection.

A connection stands for the process at its other end: the end of the connection is the death of that process. Nothing
is unpickled before both sides have proved that they know the key of the hub.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import secrets
import select
import socket
import threading
import time
from collections import deque
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, NamedTuple

from phalanx.channels.hub import Hub

_AUTHENTICATES_WITHIN_S = 10.0
_MOST_UNAUTHENTICATED = 64
_MOST_NAME_BYTES = 4096
_SENT_DIRECTLY_BYTES = 64 << 10
_SEND_BUFFER_BYTES = 1 << 20
_MOST_UNSENT = 1024
_log = logging.getLogger("phalanx")


class HubAddress(NamedTuple):
    """Host, port and key of a hub."""

    host: str
    port: int
    key: bytes


class HubServer:
    """Accepts connections to a hub until it is stopped."""

    def __init__(self, hub: Hub, host: str) -> None:
        self._hub = hub
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family, backlog=1024)
        self.address = HubAddress(host, self._listening.getsockname()[1], secrets.token_bytes(32))
        self._unauthenticated = threading.BoundedSemaphore(_MOST_UNAUTHENTICATED)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="phalanx-hub", daemon=True).start()

    def stop(self) -> None:
        """Close the listening socket and all connections."""
        shut_down(self._listening)
        self._listening.close()
        with self._lock:
            for sock in self._open:
                shut_down(sock)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                if self._listening.fileno() < 0:
                    return
                time.sleep(0.1)  # out of descriptors: connections that end free some
                continue
            if self._unauthenticated.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(sock,), name="phalanx-hub", daemon=True).start()
            else:
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.add(sock)
        tune(sock)
        connection = Connection(socket.dup(sock.fileno()))
        try:
            name = self._authenticate(sock, connection)
            if name is not None:
                self._serve_peer(name, HubPeer(sock, connection))
        finally:
            with self._lock:
                self._open.discard(sock)
            shut_down(sock)
            connection.close()
            sock.close()

    def _authenticate(self, sock: socket.socket, connection: Connection) -> str | None:
        """Return the name of the peer, None if it does not know the key or does not prove it in time."""
        deadline = threading.Timer(_AUTHENTICATES_WITHIN_S, shut_down, (sock,))
        deadline.daemon = True
        deadline.start()
        try:
            deliver_challenge(connection, self.address.key)
            answer_challenge(connection, self.address.key)
            return connection.recv_bytes(_MOST_NAME_BYTES).decode()
        except (OSError, EOFError, AuthenticationError, ValueError, AssertionError):
            return None
        finally:
            deadline.cancel()
            self._unauthenticated.release()

    def _serve_peer(self, name: str, peer: HubPeer) -> None:
        self._hub.connect(name, partial(peer.send, None))
        try:
            while True:
                for ticket, is_answered, key, verb, args in pickle.loads(peer.receive()):
                    answer = partial(peer.send, ticket) if is_answered else None
                    self._hub.ask((name, ticket), answer, key, verb, args)
        except (OSError, EOFError):
            pass
        except Exception:
            _log.warning(
                "a message of %s to its channels is damaged; it is disconnected", name, exc_info=True
            )
        self._hub.peer_died(name, "its process ended")
        peer.close()


class HubPeer:
    """A process at the other end of a connection. Sending never waits for that process to read."""

    def __init__(self, sock: socket.socket, connection: Connection) -> None:
        self._sock, self._connection = sock, connection
        self._lock = threading.Lock()
        self._unsent: deque[bytes] = deque()
        self._writer: threading.Thread | None = None
        self._poll = select.poll()
        self._poll.register(sock, select.POLLOUT)
        self._closed = False

    def receive(self) -> bytes:
        """Return the next message. A peer that does not read its answers is not served further."""
        while len(self._unsent) > _MOST_UNSENT:
            time.sleep(0.01)
        return self._connection.recv_bytes()

    def send(self, ticket: int | None, result: Any) -> None:
        """Send the answer to a request, or the number of a stored item that is not needed any more."""
        data = pickle.dumps((ticket, result), pickle.HIGHEST_PROTOCOL)
        with self._lock:
            # A socket that is ready takes a small message without blocking.
            if not self._unsent and len(data) <= _SENT_DIRECTLY_BYTES and self._poll.poll(0):
                with contextlib.suppress(OSError):  # the reading thread notices the end of the connection
                    self._connection.send_bytes(data)
            elif not self._closed:
                self._unsent.append(data)
                if len(self._unsent) == 1:
                    self._writer = threading.Thread(target=self._send_unsent, name="phalanx-hub", daemon=True)
                    self._writer.start()

    def close(self) -> None:
        """Close the connection, once no thread sends."""
        shut_down(self._sock)
        with self._lock:
            self._closed = True
        if self._writer is not None:
            self._writer.join()
        with self._lock:
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


def tune(sock: socket.socket) -> None:
    """Send small messages at once, and detect the loss of a node within seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def shut_down(sock: socket.socket) -> None:
    """End a connection, whose threads then stop waiting."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


_served: list[HubServer] = []


def start_hub(host: str) -> HubAddress:
    """Serve a hub of this process, which does nothing else."""
    _served.append(HubServer(Hub(), host))
    return _served[0].address
