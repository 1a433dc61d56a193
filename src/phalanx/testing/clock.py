"""A clock that stands still until a test moves it."""

from __future__ import annotations

import threading


class FakeClock:
    """A clock whose time passes only by :meth:`advance` and :meth:`advance_to`. Thread-safe."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._lock = threading.Lock()

    def now(self) -> float:
        """Return the time in seconds."""
        return self._now

    def advance(self, seconds: float) -> float:
        """Advance the clock by ``seconds``; return the new time.

        Raises:
            ValueError: if ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"advance({seconds!r}): time does not go back; give 0 or more seconds")
        with self._lock:
            self._now += seconds
            return self._now

    def advance_to(self, time: float) -> float:
        """Advance the clock to ``time``, unless it is later already; return the new time."""
        with self._lock:
            self._now = max(self._now, time)
            return self._now
