"""Clients of hubs, and the large items that they keep until their hub reclaims them.

A hub of this process is called directly, the hub of another process through a connection.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import itertools
import os
import secrets
import socket
import threading
import time
import weakref
from concurrent.futures import Future
from functools import partial
from typing import Any

from phalanx.backends.backend_types import Ref
from phalanx.channels.channel_state import ChannelState
from phalanx.channels.hub import Hub
from phalanx.channels.hub_server import HubAddress, connect
from phalanx.channels.staleness_state import RequestId
from phalanx.errors import DeclarationError, InternalError
from phalanx.session.background import Background, BackgroundThread
from phalanx.tracing.events import CHANNEL, OLDEST, WAITING
from phalanx.tracing.spans import process
from phalanx.worker.exit_hooks import Closers, current_closers

#: Name of this process among all processes of the run.
PROCESS = secrets.token_hex(8)
CHANNEL_THREAD = BackgroundThread("phalanx-channels")
"""Sends acknowledgements and returned leases, for which no caller waits."""
_DEFERRED_S = 0.02
_TURNS_FOR_S = 1.0
_DIED = ("gone", "the process that hosts it died")
SILENT = ("gone", "the process that hosts it does not answer")
_serial = itertools.count()

stored_items: dict[int, tuple[str, Ref]] = {}
"""Large items of this process, with the keys of their channels, by number. The references keep them alive."""


def reclaim(number: int) -> None:
    """Free a stored item."""
    stored_items.pop(number, None)


class HubClient:
    """Sends requests to a hub of this process."""

    def __init__(self, hub: Hub | None) -> None:
        closers = current_closers()
        place = closers.place if closers is not None and closers.place else "the process"
        self.name = f"{place} (host {socket.gethostname()}, pid {os.getpid()})#{next(_serial)}"
        self._tickets = itertools.count()
        self._hub, self.is_local = hub, hub is not None
        self.channels_to_leave: set[str] = set()
        if hub is not None:
            hub.connect(self.name, reclaim)

    def ask(self, key: str, verb: str, *args: Any) -> tuple[RequestId, Future[Any]]:
        """Send a request. Return its id, which also names the lease of a take, and the future answer."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # an event loop that stops waiting must not cancel it
        ticket = next(self._tickets)
        self._send(ticket, future, key, verb, args)
        return (self.name, ticket), future

    def send(self, key: str, verb: str, *args: Any) -> None:
        """Send a request without an answer."""
        self._send(next(self._tickets), None, key, verb, args)

    def send_soon(self, key: str, verb: str, *args: Any) -> None:
        """Send a request without an answer, together with the next request or a little later."""
        self.send(key, verb, *args)

    def request(self, key: str, verb: str, *args: Any, timeout: float | None = None) -> Any:
        """Send a request that does not wait at the hub, and return the answer."""
        try:
            return self.ask(key, verb, *args)[1].result(timeout)
        except concurrent.futures.TimeoutError:  # the built-in one from Python 3.11 on
            return SILENT

    def _send(self, ticket: int, future: Future[Any] | None, key: str, verb: str, args: Any) -> None:
        if self._hub is not None:
            answer = None if future is None else partial(_resolve, future)
            self._hub.ask((self.name, ticket), answer, key, verb, args)


class RemoteClient(HubClient):
    """A connection to the hub of another process. All waiting requests are answered when the connection ends."""

    def __init__(self, address: HubAddress) -> None:
        super().__init__(None)
        self._futures: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._deferred: list[tuple[Any, ...]] = []
        self._turns_until = 0.0
        self._flusher = Background(self._take_turn, thread=CHANNEL_THREAD, first_after=_DEFERRED_S)
        self.died = False
        try:
            self._connection = connect(address, self.name)
        except OSError:  # nothing listens there any more
            self.died = True
            return
        threading.Thread(target=self._receive, name="phalanx-channels", daemon=True).start()
        closers = current_closers()
        at_end = atexit.register if closers is None else closers.add
        at_end(self._flush)

    def send_soon(self, key: str, verb: str, *args: Any) -> None:
        with self._lock:
            self._deferred.append((next(self._tickets), False, key, verb, args))
        self._turns_until = time.monotonic() + _TURNS_FOR_S
        self._flusher.begin()

    def close(self) -> None:
        """End the connection."""
        if not self.died:
            self._connection.shut_down()

    def _send(self, ticket: int, future: Future[Any] | None, key: str, verb: str, args: Any) -> None:
        if future is not None:
            self._futures[ticket] = future
        self._flush((ticket, future is not None, key, verb, args))
        if self.died:
            self._answer_all()

    def _flush(self, *messages: tuple[Any, ...]) -> None:
        """Send the deferred messages now, for example before a rank exits."""
        with self._lock:
            messages, self._deferred = (*self._deferred, *messages), []
            if messages and not self.died:
                self._connection.send(messages)

    def _take_turn(self) -> float | None:
        """Send the deferred messages. Return the seconds until the next turn, None if there is none.

        Turns follow for a while, because the start of a thread can take milliseconds.
        """
        self._flush()
        return _DEFERRED_S if time.monotonic() < self._turns_until and not self.died else None

    def _receive(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                ticket, result = self._connection.receive()
                if ticket is None:
                    reclaim(result)
                elif (future := self._futures.pop(ticket, None)) is not None:
                    _resolve(future, result)
        self.died = True
        self._connection.close()
        self._answer_all()

    def _answer_all(self) -> None:
        while self._futures:
            with contextlib.suppress(KeyError):  # another thread answers it
                _resolve(self._futures.popitem()[1], _DIED)


def _resolve(future: Future[Any], result: tuple[Any, ...]) -> None:
    match result:
        case ("failed", reason):
            future.set_exception(InternalError(f"a request to a channel failed at its hub: {reason}"))
        case ("wrong", reason):
            future.set_exception(ValueError(reason))
        case _:
            future.set_result(result)


def _count_level(channel: ChannelState) -> None:
    """Record the fill level of a channel in the trace of this process."""
    if process.sink is not None:
        waiting, oldest = channel.level
        process.sink.count(CHANNEL + channel.name, {WAITING: waiting, OLDEST: 1e3 * oldest})


class HubClients:
    """Clients of this process, by remote hub and by inline rank. The key of the process outside of ranks is this."""

    def __init__(self) -> None:
        self.hub = Hub(_count_level)
        self._pid = os.getpid()
        self._remote: dict[HubAddress, RemoteClient] = {}
        self._local: weakref.WeakKeyDictionary[Closers | HubClients, HubClient] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def to(self, key: str, address: HubAddress | None) -> HubClient:
        """Return the client for the hub that serves ``key``.

        Raises:
            DeclarationError: if ``key`` was created on the inline backend of another process.
        """
        if address is not None:
            return self.to_remote(address)
        if key.split("/")[1] != PROCESS:
            raise DeclarationError(
                f"this {key.split('/')[0]} was created on the inline backend, which other processes cannot reach; "
                "create it on the backend of the groups that use it: backend='ray', or set PHALANX_BACKEND"
            )
        closers = current_closers()
        with self._lock:
            client = self._local.get(closers or self)
            if client is None:
                client = self._local[closers or self] = HubClient(self.hub)
                if closers is not None:
                    closers.if_lost.append(partial(self.hub.peer_died, client.name))
            return client

    def to_remote(self, address: HubAddress) -> RemoteClient:
        """Return the client for the hub of another process."""
        with self._lock:
            if self._pid != os.getpid():  # a fork must not use the connections of its parent
                self._pid, self._remote = os.getpid(), {}
            if address not in self._remote:
                self._remote[address] = RemoteClient(address)
            return self._remote[address]


clients = HubClients()
"""Clients of this process."""
