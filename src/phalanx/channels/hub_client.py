"""Clients of hubs, and the large items that they keep until their hub reclaims them.

A hub of this process is called directly, the hub of another process through a connection.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import pickle
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import Ref
from phalanx.channels.channel_state import ChannelState
from phalanx.channels.hub import Hub, StoredPayload
from phalanx.channels.hub_server import HubAddress, tune
from phalanx.errors import DeclarationError, InternalError
from phalanx.session.background import Background, BackgroundThread
from phalanx.tracing.events import CHANNEL, OLDEST, WAITING
from phalanx.tracing.spans import process
from phalanx.worker.exit_hooks import Closers, current_closers

#: Name of this process among all processes of the run.
PROCESS = secrets.token_hex(8)
CHANNEL_THREAD = BackgroundThread("phalanx-channels")
"""Sends acknowledgements and returned leases, for which no caller waits."""
_CONNECTS_WITHIN_S = 10.0
_DEFERRED_S = 0.02
_IDLE_TURNS = 50
_DIED = ("gone", "the process that hosts it died")
_serial = itertools.count()


def _peer_name() -> str:
    """Return a name for this process, or for the rank that runs this code."""
    closers = current_closers()
    place = closers.place if closers is not None and closers.place else "the process"
    return f"{place} (host {socket.gethostname()}, pid {os.getpid()})#{next(_serial)}"


class StoredItems:
    """References that keep the large items of this process alive, by number."""

    def __init__(self) -> None:
        self._refs: dict[int, tuple[str, Ref]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def add(self, channel: str, backend: Backend, ref: Ref) -> StoredPayload:
        """Keep an item of a channel until it is reclaimed."""
        number = next(self._numbers)
        with self._lock:
            self._refs[number] = (channel, ref)
        return StoredPayload(PROCESS, number, backend.address_of(ref))

    def get(self, number: int) -> Ref | None:
        """Return the reference to an item."""
        found = self._refs.get(number)
        return None if found is None else found[1]

    def reclaim(self, number: int) -> None:
        """Free an item."""
        with self._lock:
            self._refs.pop(number, None)

    def reclaim_channel(self, channel: str) -> None:
        """Free all items of a channel."""
        with self._lock:
            self._refs = {number: kept for number, kept in self._refs.items() if kept[0] != channel}

    def count(self, channel: str) -> int:
        """Return the number of items of a channel."""
        with self._lock:
            return sum(kept[0] == channel for kept in self._refs.values())


stored_items = StoredItems()
"""Items of this process."""


class HubClient:
    """Sends requests to a hub, and receives its notifications."""

    def __init__(self) -> None:
        self.name = _peer_name()
        self._tickets = itertools.count()
        self._overdue: dict[tuple[str, int], Callable[[], None] | None] = {}

    def ask(self, key: str, verb: str, *args: Any) -> tuple[int, Future[Any]]:
        """Send a request. Return its number, which also names the lease of a take, and the future answer."""
        raise NotImplementedError

    def send(self, key: str, verb: str, *args: Any) -> None:
        """Send a request without an answer."""
        raise NotImplementedError

    def send_soon(self, key: str, verb: str, *args: Any) -> None:
        """Send a request without an answer, together with the next request or a little later."""
        self.send(key, verb, *args)

    def request(self, key: str, verb: str, *args: Any) -> Any:
        """Send a request that does not wait at the hub, and return the answer."""
        return self.ask(key, verb, *args)[1].result()

    def on_overdue(self, key: str, lease: int, listener: Callable[[], None]) -> None:
        """Call a listener once when the rows of a lease are too old, immediately if they are so already."""
        if (key, lease) in self._overdue:
            del self._overdue[key, lease]
            listener()
        else:
            self._overdue[key, lease] = listener

    def forget(self, key: str, lease: int) -> None:
        """Remove the listener of a lease."""
        self._overdue.pop((key, lease), None)

    def tell(self, note: tuple[Any, ...]) -> None:
        """Free an item that no process needs any more, or pass a notification to the listener of its lease."""
        if note[0] == "reclaim":
            stored_items.reclaim(note[1])
        elif (listener := self._overdue.pop(note[1:], None)) is not None:
            listener()
        else:  # the answer with the lease is still on its way to its caller
            self._overdue[note[1:]] = None


class LocalClient(HubClient):
    """Calls a hub of this process directly."""

    def __init__(self, hub: Hub) -> None:
        super().__init__()
        self._hub = hub
        hub.connect(self.name, self.tell)

    def ask(self, key: str, verb: str, *args: Any) -> tuple[int, Future[Any]]:
        future: Future[Any] = Future()
        ticket = next(self._tickets)
        self._hub.ask(self.name, ticket, lambda result: _resolve(future, result), key, verb, args)
        return ticket, future

    def send(self, key: str, verb: str, *args: Any) -> None:
        self._hub.ask(self.name, next(self._tickets), None, key, verb, args)


class RemoteClient(HubClient):
    """A connection to the hub of another process. All waiting requests are answered when the connection ends."""

    def __init__(self, address: HubAddress) -> None:
        super().__init__()
        self._futures: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._deferred: list[tuple[Any, ...]] = []
        self._idle_turns = _IDLE_TURNS
        self._flusher = Background(self._take_turn, thread=CHANNEL_THREAD, first_after=_DEFERRED_S)
        self.died = False
        try:
            self._connection = _connect(address)
            self._connection.send_bytes(self.name.encode())
        except OSError:  # nothing listens there any more
            self.died = True
            return
        threading.Thread(target=self._receive, name="phalanx-channels", daemon=True).start()
        closers = current_closers()
        at_end = atexit.register if closers is None else closers.add
        at_end(self._flush)

    def ask(self, key: str, verb: str, *args: Any) -> tuple[int, Future[Any]]:
        future: Future[Any] = Future()
        ticket = next(self._tickets)
        self._futures[ticket] = future
        if not self._send((ticket, True, key, verb, args)):
            self._futures.pop(ticket, None)
            _resolve(future, _DIED)
        return ticket, future

    def send(self, key: str, verb: str, *args: Any) -> None:
        self._send((next(self._tickets), False, key, verb, args))

    def send_soon(self, key: str, verb: str, *args: Any) -> None:
        with self._lock:
            self._deferred.append((next(self._tickets), False, key, verb, args))
            begins, self._idle_turns = self._idle_turns >= _IDLE_TURNS, 0
        if begins:
            self._flusher.begin()

    def close(self) -> None:
        """End the connection."""
        if not self.died:
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(self._connection.fileno())) as sock,
            ):
                sock.shutdown(socket.SHUT_RDWR)

    def _send(self, *messages: tuple[Any, ...]) -> bool:
        with self._lock:
            deferred, self._deferred = self._deferred, []
            data = pickle.dumps([*deferred, *messages], pickle.HIGHEST_PROTOCOL)
            try:
                if not self.died:
                    self._connection.send_bytes(data)
            except OSError:
                return False
            return not self.died

    def _flush(self) -> None:
        """Send the deferred messages now, so that a rank that exits does not lose acknowledgements."""
        if self._deferred:
            self._send()

    def _take_turn(self) -> float | None:
        """Send the deferred messages. Return the seconds until the next turn, None if there is none.

        Turns follow for a while, because the start of a thread can take milliseconds.
        """
        self._flush()
        with self._lock:
            self._idle_turns += 1
            return _DEFERRED_S if self._idle_turns < _IDLE_TURNS and not self.died else None

    def _receive(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                ticket, result = pickle.loads(self._connection.recv_bytes())
                if ticket is None:
                    self.tell(result)
                elif (future := self._futures.pop(ticket, None)) is not None:
                    _resolve(future, result)
        with self._lock:
            self.died = True
            self._connection.close()
        while self._futures:
            with contextlib.suppress(KeyError):
                _resolve(self._futures.popitem()[1], _DIED)


def _resolve(future: Future[Any], result: tuple[Any, ...]) -> None:
    match result:
        case ("failed", reason):
            future.set_exception(InternalError(f"a request to a channel failed at its hub: {reason}"))
        case ("wrong", reason):
            future.set_exception(ValueError(reason))
        case _:
            future.set_result(result)


def _connect(address: HubAddress) -> Connection:
    """Return an authenticated connection. A hub with too many new connections is tried again."""
    limit = time.monotonic() + _CONNECTS_WITHIN_S
    while True:
        sock = socket.create_connection((address.host, address.port), timeout=_CONNECTS_WITHIN_S)
        sock.settimeout(None)
        tune(sock)
        connection = Connection(sock.detach())
        try:
            answer_challenge(connection, address.key)
            deliver_challenge(connection, address.key)
            return connection
        except (OSError, EOFError, AuthenticationError) as error:
            connection.close()
            if isinstance(error, AuthenticationError) or time.monotonic() > limit:
                raise ConnectionError(str(error)) from error
            time.sleep(0.05)


def _count_level(channel: ChannelState) -> None:
    """Record the fill level of a channel in the trace of this process."""
    if process.sink is not None:
        waiting, oldest = channel.level
        process.sink.count(CHANNEL + channel.name, {WAITING: waiting, OLDEST: 1e3 * oldest})


class HubClients:
    """Clients of this process, by remote hub and by inline rank."""

    def __init__(self) -> None:
        self.hub = Hub(_count_level)
        self._pid = os.getpid()
        self._remote: dict[HubAddress, RemoteClient] = {}
        self._own: LocalClient | None = None
        self._of_ranks: weakref.WeakKeyDictionary[Closers, LocalClient] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def to(self, key: str, address: HubAddress | None) -> HubClient:
        """Return the client for the hub that serves ``key``.

        Raises:
            DeclarationError: if ``key`` was created on the inline backend of another process.
        """
        if address is not None:
            return self._to_remote(address)
        if key.split("/")[1] != PROCESS:
            raise DeclarationError(
                f"this {key.split('/')[0]} was created on the inline backend, which other processes cannot reach; "
                "create it on the backend of the groups that use it: backend='ray', or set PHALANX_BACKEND"
            )
        closers = current_closers()
        with self._lock:
            if closers is None:
                self._own = self._own or LocalClient(self.hub)
                return self._own
            client = self._of_ranks.get(closers)
            if client is None:
                client = self._of_ranks[closers] = LocalClient(self.hub)
                name = client.name
                closers.if_lost.append(lambda why: self.hub.peer_died(name, why))
            return client

    def _to_remote(self, address: HubAddress) -> RemoteClient:
        with self._lock:
            if self._pid != os.getpid():  # a fork must not use the connections of its parent
                self._pid, self._remote = os.getpid(), {}
            if address not in self._remote:
                self._remote[address] = RemoteClient(address)
            return self._remote[address]

    def close(self, address: HubAddress) -> None:
        """End the connection to a hub."""
        if address in self._remote:
            self._remote[address].close()


clients = HubClients()
"""Clients of this process."""
