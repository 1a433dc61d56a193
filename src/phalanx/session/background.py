"""Threads of the library's own: they begin when there is work, and end when there is none."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable

_AFTER_ERROR_S = 1.0
_log = logging.getLogger("phalanx")


class Background:
    """One daemon thread that takes turns at some work: it begins late, and ends when nothing is left to do.

    Args:
        name: of the thread.
        turn: does what there is to do; returns the seconds until its next turn, None if nothing is left.
        finish: called once when the interpreter exits, if the thread has ever run.
        first_after: seconds until the first turn.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], float | None],
        *,
        finish: Callable[[], None] | None = None,
        first_after: float = 0.0,
    ) -> None:
        self._name = name
        self._turn = turn
        self._finish = finish
        self._first_after = first_after
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._asked = False

    @property
    def running(self) -> bool:
        """Whether its thread is there."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self) -> None:
        """See to it that a turn begins after this, soon; costs a fraction of a microsecond while the thread runs."""
        with self._lock:
            self._asked = True
            if self.running:  # not so in a fork of the process that had it
                return
            if self._finish is not None:
                atexit.unregister(self._finish)
                atexit.register(self._finish)
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        time.sleep(self._first_after)
        while True:
            self._asked = False
            pause = self._take_turn()
            with self._lock:
                if pause is None and not self._asked:
                    self._thread = None
                    return
            time.sleep(pause or 0.0)

    def _take_turn(self) -> float | None:
        try:
            return self._turn()
        except Exception:
            _log.debug("%s failed, and goes on", self._name, exc_info=True)
            return _AFTER_ERROR_S
