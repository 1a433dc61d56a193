"""Seconds that callers are willing to wait."""

from __future__ import annotations

import threading

from phalanx.errors import DispatchError
from phalanx.wire.value import Value


def bounded(seconds: float) -> float | None:
    """The seconds, or None where that is longer than any wait, such as ``float("inf")``: then there is no bound."""
    return None if seconds > threading.TIMEOUT_MAX else seconds


def checked(timeout: Value, where: str) -> float | None:
    """Seconds to wait for a result, None for ever.

    Raises:
        DispatchError: that is no number from 0 on; the message starts with ``where``.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:  # nan
        raise DispatchError(
            f"{where}(timeout={timeout!r}): expected seconds, 0 or more, or None for no bound"
        )
    return bounded(timeout)
