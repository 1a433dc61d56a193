"""Clients of hubs: requests that may wait, and the large items that are kept until their hub reclaims them.

A hub of this process is called directly, the hub of another process through a connection.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import itertools
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import thread as futures
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from phalanx.backends.backend_types import Ref
from phalanx.channels.channel_state import ChannelState
from phalanx.channels.hub import Hub
from phalanx.channels.hub_server import HubAddress, connect
from phalanx.channels.staleness_state import RequestId
from phalanx.declare.context import current_context
from phalanx.errors import ChannelEmpty, ChannelFull, DeclarationError, InternalError, StalenessTimeout
from phalanx.session.background import Background, BackgroundThread
from phalanx.tracing.events import CHANNEL, OLDEST, WAITING
from phalanx.tracing.spans import process, span
from phalanx.worker.exit_hooks import current_closers

if TYPE_CHECKING:
    from typing_extensions import Self

#: Name of this process among all processes of the run.
PROCESS = secrets.token_hex(8)
CHANNEL_THREAD = BackgroundThread("phalanx-channels")
"""Sends acknowledgements and returned leases, for which no caller waits."""
_DEFERRED_S = 0.02
_TURNS_FOR_S = 1.0
_DIED = ("gone", "the process that hosts it died")
SILENT = ("gone", "the process that hosts it does not answer")
_CLIENT = "channel client"
_serial = itertools.count()

R = TypeVar("R")
_ANSWERS_WITHIN_S = 10.0
_PROMPT_S = 0.001  # a shorter wait for another process is no entry of a trace
_CALLED_OFF = "its put was called off"

#: Frame of an idle thread of a ``ThreadPoolExecutor``.
_POOL_WAITS: Any = getattr(futures, "_worker").__code__  # noqa: B009

_users: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads of this process that use channels."""

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
    """Clients of this process, by remote hub, and in the shared state of each inline rank."""

    def __init__(self) -> None:
        self.hub = Hub(_count_level)
        self._pid = os.getpid()
        self._remote: dict[HubAddress, RemoteClient] = {}
        self._shared: dict[str, Any] = {}
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
        context = current_context()
        shared = self._shared if context is None else context.shared
        with self._lock:
            if _CLIENT not in shared:
                client = shared[_CLIENT] = HubClient(self.hub)
                closers = current_closers()
                if closers is not None:
                    closers.if_lost.append(partial(self.hub.peer_died, client.name))
            return shared[_CLIENT]

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


class HubObject:
    """Handle of a channel or a staleness, whose state is at the hub of the process that created it."""

    _key: str
    _name: str
    _address: HubAddress | None

    @property
    def _is_own(self) -> bool:
        return self._key.split("/")[1] == PROCESS

    def _client(self) -> HubClient:
        _users.add(threading.current_thread())
        return clients.to(self._key, self._address)

    def _send(self, verb: str, *args: Any) -> None:
        """Send a request without an answer."""
        self._client().send(self._key, verb, *args)

    def _request(self, verb: str, *args: Any) -> Any:
        """Send a request that does not wait, and return its result."""
        answer = self._client().request(self._key, verb, *args)
        if answer[0] == "gone":
            raise self._closed(answer[1])
        return answer[1]

    def _closed(self, reason: str) -> Exception:
        """Return the error of an object that was closed."""
        raise NotImplementedError

    def close(self, reason: str = "it was closed") -> None:
        """End the object, in the process that created it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class PendingRequest(Generic[R]):
    """A request that may wait at a hub for ``timeout`` seconds. ``finish`` makes the result from the answer."""

    def __init__(
        self,
        owner: HubObject,
        timeout: float | None,
        finish: Callable[[RequestId, tuple[Any, ...]], R],
        verb: str,
        *args: Any,
    ) -> None:
        self._owner, self._timeout, self._finish, self._verb = owner, timeout, finish, verb
        self._client = owner._client()
        self.id, self.future = self._client.ask(owner._key, verb, *args)

    def result(self) -> R:
        """Wait for the answer. An interrupted request is withdrawn.

        Raises:
            ChannelFull, ChannelEmpty, StalenessTimeout: on the inline backend, if no thread can end the wait.
        """
        try:
            answer = self._wait()
        except BaseException:
            self.withdraw()
            raise
        return self._finish(self.id, answer)

    async def result_async(self) -> R:
        """Wait for the answer in an event loop."""
        waiting = asyncio.wrap_future(self.future)
        try:
            await asyncio.wait([waiting], timeout=self._timeout)
            if not waiting.done():
                self._send("cancel", self.id)
                await asyncio.wait([waiting], timeout=_ANSWERS_WITHIN_S)
            answer = waiting.result() if waiting.done() else self._give_up()
        except BaseException:
            self.withdraw()
            raise
        finally:
            waiting.cancel()
        return self._finish(self.id, answer)

    def withdraw(self) -> None:
        """Cancel the request. A lease that was granted nevertheless is returned, an accepted item is dropped."""

        def undo(future: Future[Any]) -> None:
            if future.exception() is not None:
                return
            match future.result():
                case ("taken", *_):
                    self._send("requeue", self.id)
                case ("leased", lease, _):
                    self._send("end", lease, "its producer was interrupted")
                case ("accepted", number, _) if number >= 0:
                    self._send("drop", _CALLED_OFF, (number,))
                case _:
                    pass

        self._send("cancel", self.id)
        self.future.add_done_callback(undo)

    def _send(self, verb: str, *args: Any) -> None:
        self._client.send(self._owner._key, verb, *args)

    def _give_up(self) -> tuple[Any, ...]:
        self.withdraw()
        return SILENT

    def _wait(self) -> tuple[Any, ...]:
        if self.future.done():
            return self.future.result()
        prompt = _PROMPT_S
        if self._client.is_local:
            prompt = 0.0
            if self._timeout != 0 and not _can_end_wait():
                raise _hopeless(self._verb, self._owner._name)
        prompt = prompt if self._timeout is None else min(prompt, self._timeout)
        with contextlib.suppress(concurrent.futures.TimeoutError):  # the built-in one from Python 3.11 on
            return self.future.result(prompt)
        with span(f"{self._verb} waits", channel=self._owner._name):
            with contextlib.suppress(concurrent.futures.TimeoutError):
                return self.future.result(None if self._timeout is None else self._timeout - prompt)
            self._send("cancel", self.id)
            with contextlib.suppress(concurrent.futures.TimeoutError):
                return self.future.result(_ANSWERS_WITHIN_S)
        return self._give_up()


def _can_end_wait() -> bool:
    """Return whether another thread is busy, and uses channels or is not a daemon, so that an inline wait can end."""
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    return any((other in _users or not other.daemon) and not _is_idle(other) for other in others)


def _is_idle(thread: threading.Thread) -> bool:
    """Return whether a thread belongs to this library, is a timer, or waits for work in a pool."""
    if isinstance(thread, threading.Timer) or thread.name.startswith("phalanx-"):
        return True
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code is _POOL_WAITS


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
