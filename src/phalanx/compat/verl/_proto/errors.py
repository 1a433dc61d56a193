"""Checks of input, each failure with a message."""

from __future__ import annotations

from phalanx.compat.verl.errors import CallCheckFailed as Refused

__all__ = ["Refused", "require"]


def require(condition: object, message: str) -> None:
    """Refuse with ``message`` unless ``condition`` holds.

    Raises:
        Refused: an error of the caller's, which is also the AssertionError that code written for verl catches.
    """
    if not condition:
        raise Refused(message)
