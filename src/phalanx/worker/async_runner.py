"""Awaitables run to their end in code that is not asynchronous itself."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from phalanx.errors import InternalError


class Way(NamedTuple):
    """How calls run here: the time of one, by number and name; how what it awaits comes to its end; what it may raise
    that is no answer to it, since it ends the process, or comes from whoever ends it; and the time of one that yields,
    which gives that of each of its steps, entered anew for every item."""

    during: Callable[[int, str], AbstractContextManager[None]]
    end: Callable[[Awaitable[Any]], Awaitable[Any]]
    passes: tuple[type[BaseException], ...]
    steps: Callable[[int, str], AbstractContextManager[AbstractContextManager[None]]]


class Begun(Protocol):
    """A coroutine, or the next step of an async generator."""

    def send(self, value: None, /) -> Any: ...


async def awaited(awaitable: Awaitable[Any]) -> Any:
    """The value of an awaitable, on the running loop."""
    return await awaitable


def at_once(coroutine: Begun) -> Any:
    """The value of a coroutine that has nothing to wait for: whatever it awaits comes to its end when it is awaited."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise InternalError("a call on this thread waits for something that does not run here")


class Loop:
    """One event loop for all ``async`` methods of a rank, made when the first is called."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def to_end(self, awaitable: Awaitable[Any]) -> Any:
        """The value of an awaitable, on this thread."""

        async def wait() -> Any:
            return await awaitable

        loop = self._made()
        if _running() is None:
            return _until_complete(loop, wait())
        return _on_other_thread(lambda: loop.run_until_complete(wait()))  # inline, inside a notebook's loop

    def _made(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # A rank that runs in the driver's process ends by being dropped; the loop holds sockets.
            weakref.finalize(self, self._loop.close).atexit = False
        return self._loop

    async def to_end_at_once(self, awaitable: Awaitable[Any]) -> Any:
        """The same for a coroutine that runs by :func:`at_once`."""
        return self.to_end(awaitable)


def _until_complete(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Its value; where a signal handler raises instead, it is cancelled, else it would go on with the next call."""
    task = loop.create_task(coroutine)
    try:
        return loop.run_until_complete(task)
    except BaseException:
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                loop.run_until_complete(task)
        raise


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _on_other_thread(function: Callable[[], Any]) -> Any:
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]
