"""Which line of the user a warning is about."""

from __future__ import annotations

import sys

__all__ = ["users_line"]


def users_line() -> int:
    """For a warning: how many frames up from whoever asks the first one is that is none of the library's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("phalanx."):
        level, frame = level + 1, frame.f_back
    return level
