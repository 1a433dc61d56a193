"""Checks of timeouts, in seconds."""

from __future__ import annotations

import threading

from phalanx.errors import DispatchError
from phalanx.wire.value import Value


def bounded(seconds: float) -> float | None:
    """Return the seconds, or None (no limit) if no wait can be that long, such as ``float("inf")``."""
    return None if seconds > threading.TIMEOUT_MAX else seconds


def checked(timeout: Value, where: str) -> float | None:
    """Return a timeout in seconds; None: no limit.

    Raises:
        DispatchError: if the timeout is negative or not a number; the message starts with ``where``.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:  # nan
        raise DispatchError(
            f"{where}(timeout={timeout!r}): expected seconds, 0 or more, or None for no bound"
        )
    return bounded(timeout)
