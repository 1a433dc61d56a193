"""A time by which something must have happened, and what is said when it has not."""

from __future__ import annotations

import time

from phalanx.errors import WeightsTransferError

__all__ = ["Deadline", "lost"]


class Deadline:
    """``timeout`` seconds from now."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._end = time.monotonic() + timeout

    def left(self, waiting_for: str) -> float:
        """Seconds that are left.

        Raises:
            WeightsTransferError: none are; the message says what was waited for.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise lost(
                waiting_for,
                f"{waiting_for} did not come within {self._timeout:g} s; is it in this sync, and is it alive? Give "
                "the sync more time if it is",
            )
        return left


def lost(peer: str, message: str) -> WeightsTransferError:
    """The error that names a peer."""
    error = WeightsTransferError(message)
    error.peer = peer
    return error
