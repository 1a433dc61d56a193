"""A connection to another process's services: requests go out, answers and news come in, on two threads.

The caller's thread touches no socket: it may be interrupted anywhere, in the middle of a message too.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from phalanx.channels.framing import Frames, framed
from phalanx.channels.server import quick
from phalanx.channels.services import Failed, Reply, named
from phalanx.errors import InternalError

_CHUNK = 1 << 18
_CONNECTS_WITHIN_S = 10.0
OWNER_GONE = "the process that owns it is gone, or cannot be reached"


class Address(NamedTuple):
    """Where a process serves, and the token that it asks for."""

    host: str
    port: int
    token: bytes


class Connection:
    """To one process, from this one; it ends with either."""

    def __init__(self, address: Address) -> None:
        self.peer = named()
        self._sock = socket.create_connection(address[:2], timeout=_CONNECTS_WITHIN_S)
        self._sock.settimeout(None)
        quick(self._sock)
        self._lock = threading.Lock()
        self._tickets = itertools.count()
        self._replies: dict[int, Future[Any]] = {}
        self._listeners: dict[str, Callable[[Any], None]] = {}
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._over = False
        hello = address.token + self.peer.encode()
        self._out.put(len(hello).to_bytes(8, "little") + hello)
        for work in (self._send, self._receive):
            threading.Thread(target=work, name=f"phalanx{work.__name__}", daemon=True).start()
        os.register_at_fork(after_in_child=self._close_copy)

    def _close_copy(self) -> None:
        """In a process that was forked: it would keep the connection open when this one ends."""
        self._over = True
        with contextlib.suppress(OSError):
            self._sock.close()

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._over

    def ask(self, key: str, verb: str, *args: Any) -> Reply:
        reply = Reply(next(self._tickets), Future())
        message = framed((key, reply.ticket, verb, args))
        with self._lock:  # either it is over, or whoever ends it settles this
            over = self._over
            if not over:
                self._replies[reply.ticket] = reply.future
        if over:
            reply.future.set_result(("gone", OWNER_GONE))
        else:
            self._out.put(message)
        return reply

    def say(self, key: str, verb: str, *args: Any) -> None:
        if not self._over:  # else nobody takes it out
            self._out.put(framed((key, None, verb, args)))

    def hear(self, key: str, listener: Callable[[Any], None]) -> None:
        self._listeners[key] = listener

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            while (data := self._out.get()) is not None:
                self._sock.sendall(data)

    def _receive(self) -> None:
        frames = Frames()
        try:
            with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
                while data := self._sock.recv(_CHUNK):
                    for frame in frames.feed(data):
                        self._take(*pickle.loads(frame))
        finally:  # else all who wait would wait for ever
            self._end()

    def _take(self, key: str, ticket: int | None, what: Any) -> None:
        if ticket is None:
            listener = self._listeners.get(key)
            if listener is not None:
                listener(what)
            return
        with self._lock:
            future = self._replies.pop(ticket, None)
        if future is None:
            return
        if isinstance(what, Failed):
            future.set_exception(
                InternalError(f"a request to the process that owns {key} failed there: {what.why}")
            )
        else:
            future.set_result(what)

    def _end(self) -> None:
        with self._lock:
            self._over = True
            replies, self._replies = self._replies, {}
        for future in replies.values():
            future.set_result(("gone", OWNER_GONE))
        for listener in list(self._listeners.values()):
            listener(("gone", OWNER_GONE))
        self._out.put(None)
        self._sock.close()


class _Gone:
    """Stands for a connection that cannot be made."""

    peer = ""
    over = True

    def ask(self, key: str, verb: str, *args: Any) -> Reply:
        reply = Reply(0, Future())
        reply.future.set_result(("gone", OWNER_GONE))
        return reply

    def say(self, key: str, verb: str, *args: Any) -> None:
        """Nobody hears it."""

    def hear(self, key: str, listener: Callable[[Any], None]) -> None:
        """Nobody speaks."""


class Connections:
    """One to each process, made when first needed. One that ended is not made again: its process is gone."""

    def __init__(self) -> None:
        self._connections: dict[tuple[int, Address], Connection | _Gone] = {}
        self._lock = threading.Lock()

    def to(self, address: Address) -> Connection | _Gone:
        """The connection to a process."""
        key = (os.getpid(), address)
        found = self._connections.get(key)
        if found is not None:
            return found
        with self._lock:
            if key not in self._connections:
                try:
                    self._connections[key] = Connection(address)
                except OSError:
                    self._connections[key] = _Gone()
            return self._connections[key]


connections = Connections()
