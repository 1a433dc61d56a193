"""A clock that stands still until a test moves it."""

from __future__ import annotations

from phalanx.testing.timed import SteppedClock


class FakeClock(SteppedClock):
    """Seconds that pass only by :meth:`advance`. Safe to read and move from several threads."""
