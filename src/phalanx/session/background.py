"""Background work of a driver, on two threads that run only while there is work."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

_AFTER_ERROR_S = 1.0
_log = logging.getLogger("phalanx")


class BackgroundThread:
    """A daemon thread that runs the turns of several tasks, each when it is due."""

    def __init__(self, name: str) -> None:
        self._name = name
        # An RLock: a garbage collection on the thread that holds it may schedule work.
        self._changed = threading.Condition(threading.RLock())
        self._due: dict[Background, float] = {}
        self._now: Background | None = None
        self._thread: threading.Thread | None = None

    def _is_running(self) -> bool:
        # A fork of the process has the object, but not its thread.
        return self._thread is not None and self._thread.is_alive()

    def has(self, work: Background) -> bool:
        """Return whether a turn of this work is running or due."""
        return self._is_running() and (work in self._due or work is self._now)

    def take(self, work: Background, after: float) -> None:
        """Schedule a turn of some work in ``after`` seconds, unless a turn is due already.

        If this happens during a turn of the work, a pause that the turn returns is kept.
        """
        with self._changed:
            if not self._is_running():
                self._due.clear()
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            if work not in self._due:
                self._due[work] = time.monotonic() + after
                self._changed.notify()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                pause = work.turn()
            except Exception:
                _log.debug("%s failed, and continues", work.turn, exc_info=True)
                pause = _AFTER_ERROR_S
            with self._changed:
                self._now = None
                if pause is not None:
                    self._due[work] = time.monotonic() + pause
            del work  # otherwise it would be kept until the next turn

    def _next(self) -> Background | None:
        """Wait until some work is due, and return it; None if there is no work, which ends the thread."""
        with self._changed:
            while self._due:
                work = min(self._due, key=self._due.__getitem__)
                left = self._due[work] - time.monotonic()
                if left <= 0:
                    self._now = work  # before it is no longer due: `has` takes no lock
                    del self._due[work]
                    return work
                del work
                self._changed.wait(left)
            self._thread = None
            return None


background_thread = BackgroundThread("phalanx-background")
"""Runs work that may wait for the cluster or for a user's function; no other work may depend on it without a limit."""
monitor_thread = BackgroundThread("phalanx-monitor")
"""Checks deadlines, losses and waits for many futures: runs no function of a user, which could delay the checks."""


class Background:
    """Work that is done in turns on a background thread of the process.

    Args:
        turn: does the pending work; returns the seconds until its next turn, None if no work is left. After an error
            another turn follows.
        thread: the thread that runs the turns.
        first_after: seconds until the first turn.
    """

    def __init__(
        self,
        turn: Callable[[], float | None],
        *,
        thread: BackgroundThread = background_thread,
        first_after: float = 0.0,
    ) -> None:
        self.turn = turn
        self._thread = thread
        self._first_after = first_after

    @property
    def running(self) -> bool:
        """True if a turn is running or due."""
        return self._thread.has(self)

    def begin(self) -> None:
        """Schedule a turn soon after this call; costs some microseconds while a turn is due."""
        self._thread.take(self, self._first_after)


class WorkQueue:
    """Functions that the background thread calls one after the other, in the order in which they were added."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._background = Background(self._turn)

    def add(self, work: Callable[..., object], *args: object) -> None:
        """Have ``work(*args)`` called soon; its errors are logged. Also for finalizers, which may hold any lock."""
        self._work.put(functools.partial(work, *args))
        self._background.begin()

    def flush(self, timeout: float) -> bool:
        """Wait until all work so far is done; return whether it is."""
        if not self._background.running:
            return True
        done = threading.Event()
        self.add(done.set)
        return done.wait(timeout)

    def _turn(self) -> None:
        while not self._work.empty():
            work = self._work.get()  # at once, since only this thread takes work
            try:
                work()
            except Exception:
                _log.debug("%s failed in the background", work, exc_info=True)
            del work  # otherwise it would keep its arguments alive until the next work
