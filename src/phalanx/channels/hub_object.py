"""Handles of objects at a hub, and their requests that may wait there: timeouts, interruption, inline waits."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import thread as futures
from typing import Any, Generic, TypeVar

from phalanx.channels.hub_client import PROCESS, SILENT, HubClient, clients
from phalanx.channels.hub_server import HubAddress
from phalanx.channels.staleness_state import RequestId
from phalanx.errors import ChannelEmpty, ChannelFull, StalenessTimeout
from phalanx.tracing.spans import span

R = TypeVar("R")
_ANSWERS_WITHIN_S = 10.0
_PROMPT_S = 0.001  # a shorter wait for another process is no entry of a trace
_CALLED_OFF = "its put was called off"

#: Frame of an idle thread of a ``ThreadPoolExecutor``.
_POOL_WAITS: Any = getattr(futures, "_worker").__code__  # noqa: B009

_users: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads of this process that use channels."""


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
