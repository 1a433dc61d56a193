"""Requests that may wait at a hub: timeouts, interruption, and inline waits that nothing can end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import sys
import threading
import weakref
from concurrent.futures import Future
from concurrent.futures import thread as futures
from typing import Any

from phalanx.channels.hub_client import HubClient, LocalClient
from phalanx.errors import ChannelEmpty, ChannelFull, StalenessTimeout
from phalanx.tracing.spans import span

_ANSWERS_WITHIN_S = 10.0
_PROMPT_S = 0.001  # a shorter wait for another process is no entry of a trace
_SILENT = ("gone", "the process that hosts it does not answer")
_CALLED_OFF = "its put was called off"

#: Frame of an idle thread of a ``ThreadPoolExecutor``.
_POOL_WAITS: Any = getattr(futures, "_worker").__code__  # noqa: B009


_users: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads of this process that use channels."""


def note_thread() -> None:
    """Note that this thread uses a channel."""
    _users.add(threading.current_thread())


def _can_end_wait() -> bool:
    """Return whether another thread uses channels, or is busy and not a daemon, so that an inline wait can end."""
    me = threading.current_thread()
    return any(
        other is not me and (other in _users or not (other.daemon or _is_idle(other)))
        for other in threading.enumerate()
    )


def _is_idle(thread: threading.Thread) -> bool:
    """Return whether a thread belongs to this library, is a timer, or waits for work in a pool."""
    if isinstance(thread, threading.Timer) or thread.name.startswith("phalanx-"):
        return True
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code is _POOL_WAITS


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
            if not _can_end_wait():
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
