"""Clients of hubs: requests that may wait, and the large items that are kept until their hub reclaims them.

A hub of this process is called directly, the hub of another process through a connection.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import copy
import itertools
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import thread as futures
from functools import cached_property
from multiprocessing import AuthenticationError
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from phalanx.backends.backend_types import Backend, Ref
from phalanx.channels.hub import Hub, HubAddress, HubConnection, Request, connect, start_hub
from phalanx.channels.staleness_state import Gone, RequestId
from phalanx.config import settings
from phalanx.declare.context import current_context
from phalanx.errors import DeclarationError
from phalanx.session.background import Background, BackgroundThread
from phalanx.session.session import session
from phalanx.tracing.spans import span
from phalanx.worker.exit_hooks import current_closers

if TYPE_CHECKING:
    from typing_extensions import Self

#: Name of this process among all processes of the run.
PROCESS = secrets.token_hex(8)
_THREAD = BackgroundThread("phalanx-channels")
"""Thread that sends acknowledgements and returned leases, for which no caller waits."""
_DEFERRED_S = 0.02
_TURNS_FOR_S = 1.0
_DIED, _SILENT = OWNER_DIED = "the process that hosts it died", "the process that hosts it does not respond"
_HOPELESS = (
    ". It did not wait, since no other thread uses the inline backend and could end the wait: put, take and advance() "
    "in turn, or use the ray backend"
)
_CLIENT = "channel client"
_serial = itertools.count()
_keys = itertools.count(1)

R = TypeVar("R")
_ANSWERS_WITHIN_S = 10.0
_CONNECTS_WITHIN_S = 10.0
_RECONNECTS_WITHIN_S = 0.5  # an error of a hub that died is not late
_PROMPT_S = 0.001  # shorter waits for another process are not traced

#: Frame of an idle thread of a ``ThreadPoolExecutor``.
_POOL_WAITS: Any = getattr(futures, "_worker").__code__  # noqa: B009

_users: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads of this process that use channels."""

stored_items: dict[int, tuple[HubClient, Ref]] = {}
"""Large items of this process by number: client of the channel, and the reference that keeps them alive."""


def reclaim(number: int) -> None:
    """Free a stored item."""
    stored_items.pop(number, None)


def _await_answer(future: Future[Any], within: float | None) -> None:
    """Wait at most ``within`` seconds for an answer."""
    with contextlib.suppress(concurrent.futures.TimeoutError):  # TimeoutError itself from Python 3.11 on
        future.exception(within)


def _result(future: Future[Any] | asyncio.Future[Any]) -> Any:
    """Return the result of an answer, or raise a copy of its error, whose traceback the future does not keep.

    Raises:
        Gone: also if there is no answer.
    """
    if not future.done():
        raise Gone(_SILENT)
    error = future.exception()
    if error is not None:
        raise copy.copy(error)
    return future.result()


class HubClient:
    """A client of a hub of this process."""

    def __init__(self, hub: Hub | None) -> None:
        context = current_context()
        place = "the process" if context is None else f"rank {context.rank} of group {context.group!r}"
        self.name = f"{place} (host {socket.gethostname()}, pid {os.getpid()})#{next(_serial)}"
        self.is_local = hub is not None
        self.inline_bytes = settings().inline_bytes  # once: it reads all environment variables
        self._hub: Any = hub
        self._tickets = itertools.count()
        self._futures: dict[int, Future[Any]] = {}
        self._deferred: deque[Request] = deque()
        self._flusher = Background(self._take_turn, thread=_THREAD, first_after=_DEFERRED_S)
        self._turns_until = 0.0
        self._is_unsettled = False
        """True if a deferred request may not have been executed."""
        if hub is not None:
            hub.connect(self.name, self._receive_answer)

    def ask(self, key: str, verb: str, *args: Any) -> tuple[RequestId, Future[Any]]:
        """Send a request. Return its id, which also names the lease of a take, and the future answer."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # an event loop that stops waiting must not cancel it
        ticket = next(self._tickets)
        self._futures[ticket] = future
        self._flush((ticket, key, verb, args))
        return (self.name, ticket), future

    def request(self, key: str, verb: str, *args: Any, timeout: float | None = None) -> Any:
        """Send a request that does not wait at the hub, and return the result.

        Raises:
            Gone: if the object or the hub has ended, or the hub does not respond.
            ValueError: if the state of the object does not permit the request.
        """
        future = self.ask(key, verb, *args)[1]
        _await_answer(future, timeout)
        return _result(future)

    def send(self, key: str, verb: str, *args: Any) -> None:
        """Send a request without an answer."""
        self._flush((None, key, verb, args))

    def send_soon(self, key: str, verb: str, *args: Any) -> None:
        """Send a request without an answer together with the next request, or a little later. Take no lock."""
        self._is_unsettled = True
        self._deferred.append((None, key, verb, args))
        self._turns_until = time.monotonic() + _TURNS_FOR_S
        self._flusher.begin()

    def lose(self, why: str) -> None:
        """End the client of an inline rank that was lost: its items are lost, as those of a process would be."""
        self._hub.peer_died(self.name, why)
        self._free_items()

    def _free_items(self) -> None:
        for number in [number for number, (client, _) in [*stored_items.items()] if client is self]:
            reclaim(number)

    def _flush(self, *requests: Request) -> None:
        """Send the deferred requests, and then others."""
        self._hub.execute(self.name, (*self._pop_deferred(), *requests))

    def _pop_deferred(self) -> list[Request]:
        deferred: list[Request] = []
        with contextlib.suppress(IndexError):  # another thread took the last
            while self._deferred:
                deferred.append(self._deferred.popleft())
        return deferred

    def _take_turn(self) -> float | None:
        """Send the deferred requests. Return the seconds until the next turn, None if there is none.

        Turns continue for a while, because the start of a thread can take milliseconds.
        """
        self._flush()
        return _DEFERRED_S if time.monotonic() < self._turns_until else None

    def _receive_answer(self, ticket: int | None, result: Any) -> None:
        if ticket is None:
            reclaim(result)
            return
        future = self._futures.pop(ticket, None)
        if future is None:
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


class RemoteClient(HubClient):
    """A client of the hub of another process, over a connection.

    When the connection ends, waiting requests are answered, and items that the hub can no longer reclaim are freed.
    """

    def __init__(self, address: HubAddress, seconds: float = _CONNECTS_WITHIN_S) -> None:
        super().__init__(None)
        self._lock = threading.Lock()
        self._connection: HubConnection | None = None
        with contextlib.suppress(OSError, EOFError, AuthenticationError):  # that hub has ended
            self._connection = connect(address, self.name, seconds)
            threading.Thread(target=self._receive, name="phalanx-channels", daemon=True).start()
            closers = current_closers()
            if closers is None:
                atexit.register(self._flush)
            else:
                closers.add(self._flush)
                closers.before_result.append(self._settle)

    @property
    def died(self) -> bool:
        """True if the connection has ended."""
        return self._connection is None

    def close(self) -> None:
        """End the connection."""
        if (connection := self._connection) is not None:
            connection.close()

    def _flush(self, *requests: Request) -> None:
        with self._lock:
            requests = (*self._pop_deferred(), *requests)
            if requests and (connection := self._connection) is not None:
                connection.send(requests)
        if self.died:
            self._end()

    def _settle(self) -> Future[Any] | None:
        """Return a future that is done once the hub has executed the deferred requests; None if there were none."""
        if not self._is_unsettled:
            return None
        self._is_unsettled = False
        return self.ask("", "meet")[1]

    def _receive(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while (connection := self._connection) is not None:
                self._receive_answer(*connection.receive())
        self._connection = connection = None
        self._end()

    def _end(self) -> None:
        self._free_items()
        for ticket in [*self._futures]:
            self._receive_answer(ticket, Gone(_DIED))


class Hubs:
    """The hubs of this process, and its clients: for remote hubs, and for the driver and each inline rank.

    On Ray, the hub of a process runs in another process, which ends with the first.
    """

    def __init__(self) -> None:
        self._hub = Hub()
        self._services: dict[Backend, tuple[Any, HubAddress]] = {}
        self._remote: dict[HubAddress, RemoteClient] = {}
        self._shared: dict[str, Any] = {}
        self._lock = threading.RLock()

    def address(self, backend: Backend) -> HubAddress | None:
        """Return the address of the own hub, which is started if necessary; None for the hub within this process."""
        if backend.immediate:
            return None
        with self._lock:
            if backend not in self._services or self.remote(self._services[backend][1]).died:
                self._services[backend] = backend.start_service(start_hub)
            return self._services[backend][1]

    def stop(self, backend: Backend | None) -> None:
        """Stop the own hub of a backend, or all."""
        for each in [each for each in self._services if backend in (None, each)]:
            service, address = self._services.pop(each)
            self.remote(address).close()
            each.stop_service(service)

    def local(self) -> HubClient:
        """Return the client of the driver, or of the inline rank that runs this code, for the hub of this process."""
        context = current_context()
        shared = self._shared if context is None else context.shared
        with self._lock:
            if _CLIENT not in shared:
                client = shared[_CLIENT] = HubClient(self._hub)
                closers = current_closers()
                if closers is not None:
                    closers.if_lost.append(client.lose)
            return shared[_CLIENT]

    def remote(self, address: HubAddress) -> RemoteClient:
        """Return the client for the hub of another process. Connect again if the connection ended and the hub lives."""
        with self._lock:
            client = self._remote.get(address)
            if client is None or client.died:
                seconds = _CONNECTS_WITHIN_S if client is None else _RECONNECTS_WITHIN_S
                client = self._remote[address] = RemoteClient(address, seconds)
            return client


hubs = Hubs()
"""Hubs that this process uses."""
os.register_at_fork(after_in_child=hubs._remote.clear)  # a fork must not use the connections of its parent


class HubObject:
    """Handle of a channel or a staleness, whose state is at the hub of the process that created it.

    A handle is pickled without its backend, which is found again in the process that uses the handle.
    """

    def __init__(self, kind: str, name: str | None, backend: str | None) -> None:
        self._backend = session.get_backend(backend)
        self._address, self._backend_name = hubs.address(self._backend), self._backend.name
        number = next(_keys)
        self._kind, self._owner, self._key = kind, PROCESS, f"{kind}/{PROCESS}/{number}"
        # a resumed driver finds its channels by their names; the numbers of ranks are unique only in their process
        suffix = "" if current_context() is None else f"-{PROCESS}"
        self.name = name or f"{kind}-{number}{suffix}"

    @cached_property
    def _backend(self) -> Backend:
        return session.get_backend(self._backend_name)

    def _client(self) -> HubClient:
        """Return the client for the hub.

        Raises:
            DeclarationError: if the object was created on the inline backend of another process.
        """
        _users.add(threading.current_thread())
        if self._address is not None:
            return hubs.remote(self._address)
        if self._owner != PROCESS:
            raise DeclarationError(
                f"this {self._kind} was created on the inline backend, which other processes cannot reach; "
                "create it on the backend of the groups that use it: backend='ray', or set PHALANX_BACKEND"
            )
        return hubs.local()

    def _send(self, verb: str, *args: Any) -> None:
        """Send a request without an answer."""
        self._client().send(self._key, verb, *args)

    def _request(self, verb: str, *args: Any, timeout: float | None = None) -> Any:
        """Send a request that does not wait, and return its result."""
        try:
            return self._client().request(self._key, verb, *args, timeout=timeout)
        except Gone as gone:
            raise self._closed(str(gone)) from None

    def _closed(self, reason: str) -> Exception:
        """Return the error of an object that was closed."""
        raise NotImplementedError

    def _check_own(self, advice: str = "") -> None:
        """Raise ``DeclarationError`` if another process created the object."""
        if self._owner != PROCESS:
            raise DeclarationError(
                f"{self._kind} {self.name!r} is closed by the process that created it{advice}"
            )

    def close(self, reason: str = "it was closed") -> None:
        """End the object, in the process that created it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_backend"}


class PendingRequest(Generic[R]):
    """A request that may wait at a hub for ``timeout`` seconds. ``finish`` makes the result from request id and answer.

    It does not wait if the wait could never end: no other thread uses the inline backend.
    """

    def __init__(
        self,
        owner: HubObject,
        timeout: float | None,
        finish: Callable[[RequestId, Any], R],
        verb: str,
        *args: Any,
    ) -> None:
        self._owner, self._timeout, self._finish, self._verb = owner, timeout, finish, verb
        self._client = owner._client()
        self.id, self.future = self._client.ask(owner._key, verb, *args)

    def result(self) -> R:
        """Wait for the result. An interrupted request is withdrawn."""
        try:
            self._wait()
        except BaseException:
            self.withdraw()
            raise
        return self._finished(self.future)

    async def result_async(self) -> R:
        """Wait for the result in an event loop."""
        waiting = asyncio.wrap_future(self.future)
        try:
            await asyncio.wait([waiting], timeout=self._timeout)
            if not waiting.done():
                self._send("cancel")
                await asyncio.wait([waiting], timeout=_ANSWERS_WITHIN_S)
        except BaseException:
            waiting.cancel()
            self.withdraw()
            raise
        return self._finished(waiting)

    def withdraw(self) -> None:
        """Cancel the request. A lease that was granted nevertheless is returned, an accepted item is dropped."""
        self._send("withdraw")

    def _send(self, verb: str, *args: Any) -> None:
        self._client.send(self._owner._key, verb, self.id, *args)

    def _finished(self, future: Future[Any] | asyncio.Future[Any]) -> R:
        try:
            answer = _result(future)
        except Gone as gone:
            future.cancel()
            self.withdraw()  # a hub that did not respond in time may serve the request later
            raise self._owner._closed(str(gone)) from None
        return self._finish(self.id, answer)

    def _wait(self) -> None:
        """Wait for the answer. A request that is not served in time is cancelled, which answers it with an error."""
        timeout, is_local = self._timeout, self._client.is_local
        prompt = 0.0 if is_local else _PROMPT_S if timeout is None else min(_PROMPT_S, timeout)
        _await_answer(self.future, prompt)
        if self.future.done():
            return
        is_hopeless = is_local and timeout != 0 and not _can_end_wait()
        if not is_hopeless:
            with span(f"{self._verb} waits", channel=self._owner.name):
                _await_answer(self.future, None if timeout is None else timeout - prompt)
        if not self.future.done():
            self._send("cancel", _HOPELESS if is_hopeless else "")
            _await_answer(self.future, _ANSWERS_WITHIN_S)


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
