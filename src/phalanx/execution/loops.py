"""Awaitables run to their end in code that is not asynchronous itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from phalanx.errors import InternalError


def at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
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

        loop = self._loop = self._loop or asyncio.new_event_loop()
        if _running() is None:
            return loop.run_until_complete(wait())
        return _on_other_thread(lambda: loop.run_until_complete(wait()))  # inline, inside a notebook's loop

    async def to_end_at_once(self, awaitable: Awaitable[Any]) -> Any:
        """The same for a coroutine that runs by :func:`at_once`."""
        return self.to_end(awaitable)


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
