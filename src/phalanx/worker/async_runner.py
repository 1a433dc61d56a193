"""The event loop of a rank whose process has none: runs awaitables to their end on the calling thread."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Loop:
    """The event loop of all ``async`` methods of a rank, created at their first call."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Return the value of an awaitable."""

        async def wait() -> Any:
            return await awaitable

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # A rank in the driver's process ends by being dropped; the loop holds sockets.
            weakref.finalize(self, self._loop.close).atexit = False
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return _run_until_complete(self._loop, wait())
        # Inline ranks in a notebook: its loop runs on this thread.
        thread = ThreadPoolExecutor(1)
        try:
            return thread.submit(_run_until_complete, self._loop, wait()).result()
        finally:
            thread.shutdown(wait=False)


def _run_until_complete(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any]) -> Any:
    task = loop.create_task(coroutine)
    try:
        return loop.run_until_complete(task)
    except BaseException:
        if not task.done():  # a signal handler raised: the task would go on during the next call
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                loop.run_until_complete(task)
        raise
