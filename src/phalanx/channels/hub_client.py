"""Clients of hubs: requests, waits for their answers, and leases that have to be returned.

A hub of this process is called directly, the hub of another process through a connection.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import itertools
import logging
import os
import pickle
import secrets
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import thread as futures
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import SimpleQueue
from typing import Any

from phalanx.channels.channel_counts import Loss
from phalanx.channels.channel_state import ChannelState
from phalanx.channels.hub import Hub
from phalanx.channels.hub_server import HubAddress, tune
from phalanx.errors import ChannelEmpty, ChannelFull, DeclarationError, InternalError, StalenessTimeout
from phalanx.tracing.counters import CHANNEL, OLDEST, WAITING
from phalanx.tracing.spans import process, span
from phalanx.worker.exit_hooks import Closers, current_closers

#: Name of this process among all processes of the run.
PROCESS = secrets.token_hex(8)
_CONNECTS_WITHIN_S = 10.0
_DEFERRED_S = 0.02
_DIED = ("gone", "the process that hosts it died")
_serial = itertools.count()
_log = logging.getLogger("phalanx")
_ANSWERS_WITHIN_S = 10.0
_PROMPT_S = 0.001  # a shorter wait for another process is no entry of a trace
_SILENT = ("gone", "the process that hosts it does not answer")
_CALLED_OFF = "its put was called off"

#: Frame of an idle thread of a ``ThreadPoolExecutor``.
_POOL_WAITS: Any = getattr(futures, "_worker").__code__  # noqa: B009


def _peer_name() -> str:
    """Return a name for this process, or for the rank that runs this code."""
    closers = current_closers()
    place = closers.place if closers is not None and closers.place else "the process"
    return f"{place} (host {socket.gethostname()}, pid {os.getpid()})#{next(_serial)}"


class HubClient:
    """Sends requests to a hub, and passes its notifications to listeners."""

    def __init__(self) -> None:
        self.name = _peer_name()
        self._tickets = itertools.count()
        self._reclaimers: list[Callable[[int], None]] = []
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

    def on_reclaim(self, listener: Callable[[int], None]) -> None:
        """Call a listener with the number of each payload that no process needs any more."""
        if listener not in self._reclaimers:
            self._reclaimers.append(listener)

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
        """Pass a notification to its listener."""
        if note[0] == "reclaim":
            for listener in self._reclaimers:
                listener(note[1])
        elif (listener := self._overdue.pop(note[1:], None)) is not None:
            listener()
        else:  # the answer with the lease is still on its way to its caller
            self._overdue[note[1:]] = None


class LocalClient(HubClient):
    """Calls a hub of this process directly."""

    def __init__(self, hub: Hub) -> None:
        super().__init__()
        self._hub = hub

    def ask(self, key: str, verb: str, *args: Any) -> tuple[int, Future[Any]]:
        future: Future[Any] = Future()
        ticket = next(self._tickets)
        self._hub.ask(self, ticket, lambda result: _resolve(future, result), key, verb, args)
        return ticket, future

    def send(self, key: str, verb: str, *args: Any) -> None:
        self._hub.ask(self, next(self._tickets), None, key, verb, args)


class RemoteClient(HubClient):
    """A connection to the hub of another process. All waiting requests are answered when the connection ends."""

    def __init__(self, address: HubAddress) -> None:
        super().__init__()
        self._futures: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._deferred: list[tuple[Any, ...]] = []
        self._is_deferred = threading.Event()
        self.died = False
        try:
            self._connection = _connect(address)
            self._connection.send_bytes(self.name.encode())
        except OSError:  # nothing listens there any more
            self.died = True
            return
        for work in (self._receive, self._send_deferred):
            threading.Thread(target=work, name="phalanx-channels", daemon=True).start()
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
        self._is_deferred.set()

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

    def _send_deferred(self) -> None:
        while not self.died:
            self._is_deferred.wait()
            self._is_deferred.clear()
            time.sleep(_DEFERRED_S)
            self._flush()

    def _flush(self) -> None:
        """Send what waits for the next request. A rank that ends must not take acknowledgements with it."""
        if self._deferred:
            self._send()

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
        self._is_deferred.set()
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


def _count_level(name: str, state: ChannelState) -> None:
    """Record the fill level of a channel in the trace of this process."""
    if process.count is not None:
        waiting, oldest = state.level
        process.count(CHANNEL + name, {WAITING: waiting, OLDEST: 1e3 * oldest})


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


class ActiveThreads:
    """Threads of this process that use channels, to detect inline waits that nothing can end."""

    def __init__(self) -> None:
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def note(self) -> None:
        """Note that this thread uses a channel."""
        self._threads.add(threading.current_thread())

    def can_end_wait(self) -> bool:
        """Return whether another thread uses channels, or is busy and not a daemon."""
        me = threading.current_thread()
        return any(
            other is not me and (other in self._threads or not (other.daemon or _is_idle(other)))
            for other in threading.enumerate()
        )


def _is_idle(thread: threading.Thread) -> bool:
    """Return whether a thread belongs to this library, is a timer, or waits for work in a pool."""
    if isinstance(thread, threading.Timer) or thread.name.startswith("phalanx-"):
        return True
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code is _POOL_WAITS


active_threads = ActiveThreads()
"""Threads of this process."""


class PendingRequest:
    """A request to a hub that may wait there for ``timeout`` seconds."""

    def __init__(
        self, client: HubClient, key: str, name: str, timeout: float | None, verb: str, *args: Any
    ) -> None:
        self.client, self.timeout = client, timeout
        self._key, self._name, self._verb = key, name, verb
        self.ticket, self.future = client.ask(key, verb, *args, timeout != 0)

    def result(self) -> Any:
        """Wait for the answer. An interrupted request is withdrawn.

        Raises:
            ChannelFull, ChannelEmpty, StalenessTimeout: on the inline backend, if no thread can end the wait.
        """
        try:
            return self._wait()
        except BaseException:
            self.withdraw()
            raise

    def _wait(self) -> Any:
        if self.future.done():
            return self.future.result()
        timeout, prompt = self.timeout, _PROMPT_S
        if isinstance(self.client, LocalClient):
            prompt = 0.0
            if not active_threads.can_end_wait():
                raise _hopeless(self._verb, self._name)
        prompt = prompt if timeout is None else min(prompt, timeout)
        with contextlib.suppress(concurrent.futures.TimeoutError):  # the built-in one from Python 3.11 on
            return self.future.result(prompt)
        with span(f"{self._verb} waits", channel=self._name):
            try:
                return self.future.result(None if timeout is None else timeout - prompt)
            except concurrent.futures.TimeoutError:
                return self._after_timeout()

    def _after_timeout(self) -> Any:
        self.client.send(self._key, "cancel", self.ticket)
        try:
            return self.future.result(_ANSWERS_WITHIN_S)
        except concurrent.futures.TimeoutError:
            self.withdraw()
            return _SILENT

    async def result_async(self) -> Any:
        """Wait for the answer in an event loop."""
        try:
            if not await _is_done(self.future, self.timeout):
                self.client.send(self._key, "cancel", self.ticket)
                if not await _is_done(self.future, _ANSWERS_WITHIN_S):
                    self.withdraw()
                    return _SILENT
            return self.future.result()
        except BaseException:
            self.withdraw()
            raise

    def withdraw(self) -> None:
        """Cancel the request. A lease that was granted nevertheless is returned, an accepted item is dropped."""

        def undo(future: Future[Any]) -> None:
            if future.exception() is not None:
                return
            match future.result():
                case ("taken", *_):
                    self.client.send(self._key, "requeue", (self.client.name, self.ticket), ())
                case ("leased", lease, _):
                    self.client.send(self._key, "end", lease, "its producer was interrupted")
                case ("accepted", number, _) if number >= 0:
                    self.client.send(self._key, "drop", _CALLED_OFF, (number,))
                case _:
                    pass

        self.client.send(self._key, "cancel", self.ticket)
        self.future.add_done_callback(undo)


async def _is_done(future: Future[Any], seconds: float | None) -> bool:
    """Wait for a future in an event loop. Cancelling the wait does not cancel the future."""
    loop = asyncio.get_running_loop()
    local: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not local.done():
            local.set_result(None)

    def notify(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(wake)

    future.add_done_callback(notify)
    await asyncio.wait([local], timeout=seconds)
    return future.done()


def _hopeless(verb: str, channel: str) -> Exception:
    if verb == "lease":
        return StalenessTimeout(
            "lease(): training is too far behind for these rows, and on the inline backend no other thread can "
            "advance it, so that it would never catch up; train and advance() first, or use the ray backend"
        )
    if verb == "put":
        return ChannelFull(
            f"channel {channel!r}: it is full, and on the inline backend no other thread takes items, so that there "
            "would never be room; take first, give the channel a larger maxsize, or use the ray backend",
            channel=channel,
        )
    return ChannelEmpty(
        f"channel {channel!r}: it has fewer items than requested, and on the inline backend no other thread puts "
        "items, so that nothing would ever come; put first, or use the ray backend",
        channel=channel,
    )


class TakenLease:
    """Lease of a taken batch at the hub of its channel."""

    def __init__(self, client: HubClient, key: str, name: str, ticket: int) -> None:
        self.name = name
        self._client, self._key, self._lease = client, key, (client.name, ticket)

    def ack(self) -> None:
        """Report the delivery."""
        self._client.send_soon(self._key, "ack", self._lease)

    def requeue(self) -> None:
        """Return the items to the front of the channel."""
        self._client.send(self._key, "requeue", self._lease, ())

    def lose(self, unreadable: Sequence[int]) -> Sequence[Loss]:
        """Return the readable items to the channel, and return the losses of the others."""
        answer = self._client.request(self._key, "requeue", self._lease, unreadable)
        return answer[1] if answer[0] == "done" else ()


class LeakedLeases:
    """Leases of batches that were garbage-collected without an acknowledgement.

    A thread requeues them, since a destructor must not send messages.
    """

    def __init__(self) -> None:
        self._leases: deque[TakenLease] = deque()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread unless it runs. A forked process has none."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="phalanx-leases", daemon=True)
            self._thread.start()

    def add(self, lease: TakenLease) -> None:
        """Note a lease without taking a lock."""
        self._leases.append(lease)
        self._wake.put(None)

    def requeue(self) -> None:
        """Requeue all leases that were added before."""
        with self._lock:  # a caller that waits for the lock finds all of them requeued
            while self._leases:
                lease = self._leases.popleft()
                _log.warning(
                    "channel %r: a batch was dropped without ack() or requeue(); its items return to the front. Take "
                    "in a `with` block, or call batch.ack() or batch.ack_with(future)",
                    lease.name,
                )
                lease.requeue()

    def _run(self) -> None:
        while True:
            self._wake.get()
            self.requeue()


leaked_leases = LeakedLeases()
"""Leases of this process."""
