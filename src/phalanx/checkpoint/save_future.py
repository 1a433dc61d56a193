"""A save or a load under way."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from phalanx.calls.future import Awaited
from phalanx.calls.timeouts import checked
from phalanx.errors import CallCancelled, CallTimeout
from phalanx.session.wait_threads import Pending

__all__ = ["SaveFuture"]

T = TypeVar("T")

_log = logging.getLogger("phalanx")
_open: set[SaveFuture[Any]] = set()
"""Those under way, and those that failed of which nobody has heard."""


def _end_all() -> None:
    """A script that comes to its end has what it wanted saved, and hears of what could not be.

    It is registered anew by each save, to come before what takes the ranks away.
    """
    for one in list(_open):
        one._end()


class SaveFuture(Awaited[T]):
    """What a thread of the driver does beside: ``result()`` waits for it, ``await`` does so in an event loop.

    ``px.gather`` takes it beside those of calls. A process that ends waits for it.

    Attributes:
        asked: somebody has heard what came of it.
    """

    def __init__(self, work: Callable[[], T], what: str, cancelled: threading.Event) -> None:
        self._what = what
        self._cancelled = cancelled
        self.asked = False
        self._future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._future.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run, args=(work,), name="phalanx-save", daemon=True)
        _open.add(self)
        atexit.unregister(_end_all)
        atexit.register(_end_all)
        self._thread.start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._future.set_result(work())
            _open.discard(self)
        except BaseException as error:
            self._future.set_exception(error)

    def result(self, timeout: float | None = None) -> T:
        """Wait until it is over, and give what came of it.

        Args:
            timeout: seconds to wait at most; when they are over it goes on, and can be asked again.

        Raises:
            CallTimeout: it is not over yet.
            As ``px.save``.
        """
        seconds = checked(timeout, "SaveFuture.result")
        try:
            try:
                return self._future.result(seconds)
            finally:
                self._heard()
        except concurrent.futures.TimeoutError:
            if self._future.done():
                raise
            raise CallTimeout(f"{self._what} is not over after {seconds} s; it goes on, ask again") from None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until it is over; what :meth:`result` raises, or None."""
        try:
            self.result(timeout)
        except CallTimeout:
            if not self.done():
                raise
            return self._future.exception()
        except Exception as error:
            return error
        return None

    def done(self) -> bool:
        """Whether it is over; does not wait."""
        return self._future.done()

    def cancel(self) -> bool:
        """End it before the step is whole, and wait until no rank writes any more.

        Nothing is left of that step, and ``result()`` raises ``CallCancelled``.

        Returns:
            False if it was over before, or its step was just becoming whole: what came of it stands.
        """
        if self.done():
            return False
        self._cancelled.set()
        self._thread.join()
        if self.cancelled():
            self._heard()
        return self.cancelled()

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self.done() and isinstance(self._future.exception(), CallCancelled)

    def pending(self, deadline: float | None = None) -> Pending | None:
        """Nothing of a backend's is waited for."""
        return None

    def __await__(self) -> Generator[Any, None, T]:
        try:
            return (yield from asyncio.wrap_future(self._future).__await__())
        finally:
            self._heard()

    def _heard(self) -> None:
        if self.done():
            self.asked = True
            _open.discard(self)

    def _end(self) -> None:
        """Wait until it is over, and log an error that nobody has heard of."""
        self._thread.join()
        error = None if self.asked else self._future.exception()
        if error is not None:
            _log.error("the %s failed, and nobody asked for what came of it: %s", self._what, error)
        self._heard()

    def __repr__(self) -> str:
        return f"<{self._what}: {'over' if self.done() else 'under way'}>"
