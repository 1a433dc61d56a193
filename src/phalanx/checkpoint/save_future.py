"""The future of a submitted save."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from phalanx.calls.future import Awaited
from phalanx.errors import CallCancelled, CallTimeout
from phalanx.session.session import session
from phalanx.wire.value import checked_timeout

T = TypeVar("T")

_log = logging.getLogger("phalanx")
_open: set[SaveFuture[Any]] = set()
"""Saves that have not ended, and failed saves whose error was not read."""


def finish_open_saves() -> None:
    """Wait for submitted saves at the end of the script, and log unread errors.

    Each save registers this function again, so that it runs before the exit hooks that stop the ranks.
    """
    for future in list(_open):
        error = future.exception()
        if error is not None:
            _log.error("the %s failed, and nobody asked for its result: %s", future.title, error)


class SaveFuture(Awaited[T]):
    """A save in a thread of the driver. ``result()`` waits for it, ``await`` waits in an event loop.

    ``px.gather`` accepts it next to futures of calls. A process waits for its saves before it ends.

    Attributes:
        title: title of the save, for messages.
        was_read: True once the caller has read the result or the error.
    """

    def __init__(self, work: Callable[[], T], title: str, cancelled: threading.Event) -> None:
        self.title = title
        self._cancelled = cancelled
        self.was_read = False
        _open.add(self)
        atexit.unregister(finish_open_saves)
        atexit.register(finish_open_saves)
        self._future = session.waiters.submit(work)
        self._future.add_done_callback(self._forget)

    def _forget(self, future: concurrent.futures.Future[T]) -> None:
        if future.exception() is None:
            _open.discard(self)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the end of the save, and return its result.

        Args:
            timeout: maximum seconds to wait. The save continues afterwards.

        Raises:
            CallTimeout: if the save has not ended in time.
            CallCancelled: if the save was cancelled.
            PhalanxError: as ``px.save``.
        """
        self.exception(timeout)
        return self._future.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the save, and return the error that :meth:`result` raises, or None."""
        seconds = checked_timeout(timeout, "SaveFuture.result")
        concurrent.futures.wait([self._future], seconds)
        if not self.done():
            raise CallTimeout(f"{self.title} has not ended after {seconds} s; it continues, ask again")
        self._mark_read()
        return self._future.exception()

    def done(self) -> bool:
        """Return whether the save has ended."""
        return self._future.done()

    def cancel(self) -> bool:
        """End the save before its step is complete, and wait until no rank writes any more.

        Nothing of that step is left, and ``result()`` raises ``CallCancelled``.

        Returns:
            False if the save had ended, or its step was just becoming complete.
        """
        if self.done():
            return False
        self._cancelled.set()
        concurrent.futures.wait([self._future])
        if self.cancelled():
            self._mark_read()
        return self.cancelled()

    def cancelled(self) -> bool:
        """Return whether the save was cancelled."""
        return self.done() and isinstance(self._future.exception(), CallCancelled)

    def __await__(self) -> Generator[Any, None, T]:
        try:
            # An event loop that stops waiting must not cancel a save whose thread has not begun.
            return (yield from asyncio.shield(asyncio.wrap_future(self._future)).__await__())
        finally:
            self._mark_read()

    def _mark_read(self) -> None:
        if self.done():
            self.was_read = True
            _open.discard(self)

    def __repr__(self) -> str:
        return f"<{self.title}: {'ended' if self.done() else 'in progress'}>"
