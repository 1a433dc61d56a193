"""A save or a load under way."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from phalanx.errors import CallTimeout
from phalanx.runtime.calls.seconds import checked

__all__ = ["SaveFuture"]

T = TypeVar("T")


class SaveFuture(Generic[T]):
    """What a thread of the driver does beside: ``result()`` waits for it, ``await`` does so in an event loop."""

    def __init__(self, work: Callable[[], T], what: str) -> None:
        self._what = what
        self._future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._future.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run, args=(work,), name="phalanx-save", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._future.set_result(work())
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
            return self._future.result(seconds)
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

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self._future).__await__()

    def __repr__(self) -> str:
        return f"<{self._what}: {'over' if self.done() else 'under way'}>"
