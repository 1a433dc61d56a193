"""Threads that wait for calls, so that an event loop, or a wait for several calls, need not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Waiters:
    """As many threads as there are waits at once; they are used again.

    Unlike those of a ``ThreadPoolExecutor`` they are daemons: the interpreter joins an executor's threads when it
    exits, so that a wait nobody is interested in any more would keep the process from ending.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._idle = threading.Semaphore(0)

    def submit(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run ``function(*args, **kwargs)`` on one of the threads, beginning now."""
        future: Future[R] = Future()
        self._work.put((future, lambda: function(*args, **kwargs)))
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._run, name="phalanx-await", daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            self._do(*self._work.get())
            self._idle.release()

    @staticmethod
    def _do(future: Future[Any], function: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)


waiters = Waiters()
"""Those of this process."""
