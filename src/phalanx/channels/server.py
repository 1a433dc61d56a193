"""The way to this process's services for other processes: one thread, one socket that listens, no name anywhere.

A connection stands for the process at its other end: where that ends, however it does, the services hear of it at
once. A process shows the token that came with the handle before anything that it sends is unpickled.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import pickle
import secrets
import selectors
import socket
import threading
from collections import deque
from typing import Any

from phalanx.channels.framing import Frames, framed
from phalanx.channels.services import Failed, services
from phalanx.worker.rendezvous import listening_socket

TOKEN_BYTES = 16
_CHUNK = 1 << 18
_MOST_BEFORE_TOKEN = 4096
_ALL = selectors.EVENT_READ | selectors.EVENT_WRITE
_log = logging.getLogger("phalanx")


class RemotePeer:
    """A process at the other end of a connection."""

    def __init__(self, server: Server, sock: socket.socket) -> None:
        self.sock = sock
        self.frames = Frames()
        self.name = ""
        self._server = server
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()

    def tell(self, service: str, note: Any) -> None:
        self._send(framed((service, None, note)))

    def answer(self, service: str, ticket: int, what: Any) -> None:
        """Answer a request."""
        self._send(framed((service, ticket, what)))

    def _send(self, data: bytes) -> None:
        with self._lock:
            self._unsent.append(memoryview(data))
            if len(self._unsent) > 1:
                return
            left = self._sent_now()
        if left:
            self._server.wake(self)

    def send_more(self) -> bool:
        """Send what there is room for; whether some is left."""
        with self._lock:
            return self._sent_now()

    def _sent_now(self) -> bool:
        while self._unsent:
            try:
                count = self.sock.send(self._unsent[0])
            except BlockingIOError:
                return True
            except OSError:  # it is gone, which the next read finds out
                self._unsent.clear()
                return False
            if count == len(self._unsent[0]):
                self._unsent.popleft()
            else:
                self._unsent[0] = self._unsent[0][count:]
        return False


class Server:
    """Serves until it is stopped; its thread takes no time while nobody asks."""

    def __init__(self, host: str) -> None:
        self._listening = listening_socket(host)
        self._listening.setblocking(False)
        self.address = (host, self._listening.getsockname()[1])
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)
        self._writing: set[RemotePeer] = set()
        self._lock = threading.Lock()
        self._stopped = self._ended = False
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="phalanx-services", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End all connections. Idempotent."""
        self._stopped = True
        self.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def wake(self, peer: RemotePeer | None = None) -> None:
        """Have the thread send to a peer what it could not take at once, or look at its deadlines anew."""
        with self._lock:
            if self._ended:  # what has the number of the pipe now is somebody else's
                return
            if peer is not None:
                self._writing.add(peer)
            with contextlib.suppress(BlockingIOError):  # it is full: the thread will wake
                os.write(self._woken, b"x")

    def _serve(self) -> None:
        while not self._stopped:
            try:
                for key, mask in self._selector.select(services.tick()):
                    self._handle(key, mask)
            except Exception:  # of one request: the others are to be served all the same
                _log.warning("a request to this process's channels failed", exc_info=True)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, RemotePeer):
                key.data.sock.close()
        self._listening.close()
        self._selector.close()
        with self._lock:
            self._ended = True
            os.close(self._wake)
            os.close(self._woken)

    def _handle(self, key: selectors.SelectorKey, mask: int) -> None:
        if key.fileobj is self._listening:
            self._accept()
        elif key.fileobj == self._wake:
            self._watch_writing()
        else:
            peer: RemotePeer = key.data
            if mask & selectors.EVENT_WRITE and not peer.send_more():
                self._selector.modify(peer.sock, selectors.EVENT_READ, peer)
            if mask & selectors.EVENT_READ:
                self._read(peer)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listening.accept()
            quick(sock)
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, RemotePeer(self, sock))

    def _watch_writing(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        with self._lock:
            writing, self._writing = self._writing, set()
        for peer in writing:
            with contextlib.suppress(KeyError, ValueError):  # it is gone meanwhile
                self._selector.modify(peer.sock, _ALL, peer)

    def _read(self, peer: RemotePeer) -> None:
        try:
            data = peer.sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            for frame in peer.frames.feed(data) if data else ():
                self._take(peer, frame)
            if data and (peer.name or peer.frames.waiting < _MOST_BEFORE_TOKEN):
                return
        except _Refused:
            pass
        self._leave(peer)

    def _take(self, peer: RemotePeer, frame: bytes) -> None:
        if not peer.name:
            if not hmac.compare_digest(frame[:TOKEN_BYTES], self.token):
                raise _Refused
            peer.name = frame[TOKEN_BYTES:].decode()
            return
        key, ticket, verb, args = pickle.loads(frame)
        service = services.get(key)
        if service is None:
            if ticket is not None:
                peer.answer(key, ticket, ("gone", "it was closed"))
            return
        answer = None if ticket is None else lambda what: peer.answer(key, ticket, what)
        try:
            service.ask(peer, (peer.name, ticket), answer, verb, args)
        except Exception as error:  # whoever asked would wait for ever
            _log.warning("a request to this process's channels failed", exc_info=True)
            if answer is not None:
                answer(Failed(f"{verb}: {type(error).__name__}: {error}"))

    def _leave(self, peer: RemotePeer) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.sock)
        peer.sock.close()
        if peer.name:
            services.left(peer, "its process ended")


class _Refused(Exception):
    """A peer does not know the token."""


def quick(sock: socket.socket) -> None:
    """Send small messages at once, and find out within seconds that a node is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class OneServer:
    """The server of this process, made when first needed and made anew after it was stopped."""

    def __init__(self) -> None:
        self._server: Server | None = None
        self._pid = 0
        self._lock = threading.Lock()

    def get(self, host: str) -> Server:
        """It, reached by others at ``host``."""
        with self._lock:
            if self._server is None or self._pid != os.getpid():
                self._server, self._pid = Server(host), os.getpid()
            return self._server

    @property
    def running(self) -> Server | None:
        """It, where it is there."""
        return self._server if self._pid == os.getpid() else None

    def stop(self) -> None:
        """End all connections to this process."""
        with self._lock:
            server, self._server = self._server, None
            pid, self._pid = self._pid, 0
        if server is not None and pid == os.getpid():
            server.stop()


one_server = OneServer()
