"""The hub: all channels and staleness managers of a process, and the peers that use them.

The hub serves other processes over ``multiprocessing.connection``, with a thread for each connection. A connection
stands for the process at its other end: the end of the connection counts as the death of that process. Nothing is
unpickled before both sides have proved that they know the key of the hub.
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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, NamedTuple

from phalanx.channels.channel_state import By, ChannelState
from phalanx.channels.staleness_state import Done, Gone, Item, RequestId, SavedState, StalenessState
from phalanx.errors import InternalError
from phalanx.tracing.events import CHANNEL, OLDEST, WAITING
from phalanx.tracing.spans import process

_AUTHENTICATES_WITHIN_S = 10.0
_MOST_UNAUTHENTICATED = 64
_SENT_DIRECTLY_BYTES = 64 << 10
_SEND_BUFFER_BYTES = 1 << 20
_MOST_UNSENT = 1024
_MOST_NAME_BYTES = 4096
_log = logging.getLogger("phalanx")

Answer = Callable[[int | None, Any], None]
"""Function that sends a peer a ticket and its answer, or None and the number of a stored item that has ended."""
Request = tuple[int | None, str, str, tuple[Any, ...]]
"""Ticket (number by the peer; None: no answer is expected), key of the object ("": the hub), verb and arguments."""


class StoredPayload(NamedTuple):
    """Bytes in the store of a process: the process's own number for them, and the address for other processes."""

    process: str
    number: int
    address: Any


Payload = bytes | StoredPayload
Packed = tuple[Payload, int, int | None, tuple[float, ...]]
"""Payload, number of bytes, number of rows (None: not made of rows) and their lengths."""
Leased = tuple[str, RequestId, tuple[int, ...]]
"""Key of a staleness, lease, and version of each row."""


class Hub:
    """Channels and staleness managers by key, and the peers whose requests to them it executes.

    Answers are delivered in order, outside of the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outbox: deque[tuple[Answer, int | None, Any]] = deque()
        self._delivering = threading.RLock()  # a receiver in this process may make requests
        self._peers: dict[str, Answer] = {}
        self._states: dict[str, ChannelState | StalenessState] = {}

    def connect(self, peer: str, answer: Answer) -> None:
        """Add a process, or an inline rank. Its name ends with "#" and a serial number, which makes it unique."""
        with self._lock:
            self._peers[peer] = answer

    def execute(self, peer: str, requests: Sequence[Request]) -> None:
        """Execute requests of a peer. An answer is a result or an error."""
        with self._lock:
            for ticket, key, verb, args in requests:
                done = _ignore if ticket is None else partial(self._post, peer, ticket)
                try:
                    self._execute((peer, ticket or 0), done, key, verb, args)
                except (ValueError, Gone) as error:
                    done(type(error)(*error.args))  # without a traceback
                except Exception as error:
                    cause = f"{verb}: {type(error).__name__}: {error}"
                    done(InternalError(f"a request to a channel failed at its hub: {cause}"))
        with self._delivering:
            while self._outbox:
                answer, ticket, result = self._outbox.popleft()
                answer(ticket, result)

    def peer_died(self, peer: str, why: str) -> None:
        """Requeue the channel leases of a dead process, drop its row leases, and count its stored items as lost."""
        self.execute(peer, [(None, "", "remove", (peer, why))])

    def _post(self, peer: str, ticket: int | None, result: Any) -> None:
        if peer in self._peers:
            self._outbox.append((self._peers[peer], ticket, result))

    def _execute(self, request: RequestId, done: Done, key: str, verb: str, args: Sequence[Any]) -> None:
        state = self._states.get(key)
        if not key:
            done(getattr(self, f"_{verb}")(*args))
        elif verb == "put":
            self._put(state, request, done, *args)
        elif state is None:
            done(Gone("it was closed"))
        elif verb in ("take", "lease"):
            getattr(state, verb)(request, done, *args)
        else:
            done(getattr(state, verb)(*args))
        if isinstance(state, ChannelState):
            if process.sink is not None:  # tested first, since a request takes only microseconds
                count_level(state.name, *state.level())
            if state.closed and not state.leases:  # a closed channel still reclaims the bytes of leased items
                self._states.pop(key, None)

    def _meet(self) -> None:
        """Do nothing. The answer shows that earlier requests of the peer were executed."""

    def _remove(self, peer: str, why: str) -> None:
        if self._peers.pop(peer, None) is not None:
            for state in self._states.values():
                state.peer_died(peer, why)

    def _open(self, key: str, name: str, maxsize: int | None, by: By) -> None:
        self._states[key] = ChannelState(name, maxsize, by, reclaim=self._reclaim, clock=time.monotonic)

    def _open_staleness(self, key: str, *numbers: int) -> None:
        self._states[key] = StalenessState(*numbers, evict=self._evict)

    def _put(
        self, channel: Any, request: RequestId, done: Done, packed: Packed, leased: Leased | None
    ) -> None:
        """Put an item into a channel; None: a channel that was closed, so that leased rows are dropped."""
        item = Item(request, *packed)
        if leased is not None:
            key, lease, item.versions = leased
            staleness: Any = self._states[key]
            if not staleness.begin_put(lease, request, item.versions):
                done((-1, 0))
                return
            item.bounded = staleness if item.versions else None
        (channel or ChannelState(ended="it was closed")).put(done, item)

    def _reclaim(self, item: Item) -> None:
        if item.holder is not None:
            self._post(item.holder, None, item.payload.number)

    def _evict(self) -> None:
        for state in self._states.values():
            if isinstance(state, ChannelState):
                state.expire()

    def _snapshot(self, keys: Sequence[str]) -> list[SavedState]:
        """Return the states of channels and a staleness, all of the same moment. Raises Gone if one is closed."""
        if any(key not in self._states for key in keys):
            raise Gone("it was closed")
        return [self._states[key].state() for key in keys]

    def _restore(
        self, channels: Mapping[str, SavedState], staleness: str | None, state: SavedState | None
    ) -> None:
        """Restore channels and a staleness from their states. Raises ValueError if they were used before."""
        states: dict[str, Any] = self._states
        for key in channels:
            if states[key].items.submitted:
                raise ValueError(f"an item was put into channel {states[key].name!r} already")
        if staleness is not None and state is not None:
            bound = states[staleness]
            if bound.stats().rows.submitted:
                raise ValueError("rows of the staleness were leased already")
            ranges = [units for saved in channels.values() for units in saved["ranges"]]
            bounded = [units for units in ranges if units.item.versions]
            for units in bounded:
                units.item.bounded = bound
            bound.restore(state, [(units.item, row) for units in bounded for row in range(*units[1:3])])
        for key, saved in channels.items():
            states[key].restore(saved)


def count_level(channel: str, waiting: int, oldest: float) -> None:
    """Record the length of a channel, and the age of its oldest item, in the trace of this process, if there is one."""
    if process.sink is not None:
        process.sink.count(CHANNEL + channel, {WAITING: waiting, OLDEST: 1e3 * oldest})


def _ignore(result: Any) -> None:
    """Receive an answer that no peer waits for."""


class HubAddress(NamedTuple):
    """Host, port and key of a hub."""

    host: str
    port: int
    key: bytes


class HubConnection:
    """A connection between a hub and a peer. Unless ``may_wait``, sending never waits for the other end to read."""

    def __init__(self, sock: socket.socket, *, may_wait: bool) -> None:
        _tune(sock)
        self._may_wait = may_wait
        self._connection = Connection(sock.detach())
        self._lock = threading.Lock()
        self._unsent: deque[bytes] = deque()
        self._poll = select.poll()
        self._poll.register(self._connection.fileno(), select.POLLOUT)

    def accept(self, key: bytes) -> str:
        """Authenticate both ends, as the hub, and return the name of the peer. Nothing is unpickled before.

        Raises:
            OSError, EOFError, AuthenticationError, ValueError: if the peer does not know the key.
        """
        deliver_challenge(self._connection, key)
        answer_challenge(self._connection, key)
        return self._connection.recv_bytes(_MOST_NAME_BYTES).decode()

    def introduce(self, key: bytes, name: str) -> None:
        """Authenticate both ends, as the peer, and send its name.

        Raises:
            OSError, EOFError, AuthenticationError: if the hub does not know the key.
        """
        answer_challenge(self._connection, key)
        deliver_challenge(self._connection, key)
        self._connection.send_bytes(name.encode())

    def receive(self) -> Any:
        """Wait for the next message and return it. A peer with too many unread answers is not served further.

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
        # the peer may have ended it
        with socket.socket(fileno=os.dup(self._connection.fileno())) as sock, contextlib.suppress(OSError):
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


def connect(address: HubAddress, name: str, seconds: float) -> HubConnection:
    """Return an authenticated connection, once the hub has capacity for it.

    Raises:
        OSError, EOFError, AuthenticationError: if no hub listens there, also after ``seconds``, or it has another key.
    """
    sock = socket.create_connection((address.host, address.port), timeout=seconds)
    sock.settimeout(None)
    connection = HubConnection(sock, may_wait=True)
    connection.introduce(address.key, name)
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
    """A server that accepts connections to a hub, as long as its process lives."""

    def __init__(self, hub: Hub, host: str) -> None:
        self._hub = hub
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family, backlog=1024)
        self.address = HubAddress(host, self._listening.getsockname()[1], secrets.token_bytes(32))
        self._unauthenticated = threading.BoundedSemaphore(_MOST_UNAUTHENTICATED)
        threading.Thread(target=self._accept, name="phalanx-hub", daemon=True).start()

    def _accept(self) -> None:
        """Accept connections. While too many are not authenticated, others wait in the backlog."""
        while True:
            self._unauthenticated.acquire()
            try:
                sock, _ = self._listening.accept()
            except OSError:
                self._unauthenticated.release()
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


def start_hub(host: str) -> HubAddress:
    """Serve a hub in this process, which does nothing else, and return its address. Threads keep the server alive."""
    return HubServer(Hub(), host).address
