"""A clock that stands still until a test moves it."""

from __future__ import annotations

import threading


class FakeClock:
    """Seconds that pass only by :meth:`advance`. Safe to read and move from several threads."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._lock = threading.Lock()

    def now(self) -> float:
        """Return the time in seconds."""
        return self._now

    def advance(self, seconds: float) -> float:
        """Let time pass; return the new time.

        Raises:
            ValueError: if ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"advance({seconds!r}): time does not go back; give 0 or more seconds")
        with self._lock:
            self._now += seconds
            return self._now

    def advance_to(self, time: float) -> float:
        """Let time pass until ``time``, if that is still to come; return the new time."""
        with self._lock:
            self._now = max(self._now, time)
            return self._now
