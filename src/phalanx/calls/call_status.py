"""Where a call stands: one of four, which cannot contradict each other."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class UnderWay:
    """Nobody has seen its end."""


@dataclass(frozen=True)
class Cancelling:
    """Somebody is ending it; ``over`` is set when it stands how that went."""

    over: threading.Event


@dataclass(frozen=True)
class Returned:
    """All its ranks returned; this is what became of their outputs."""

    value: Any


@dataclass(frozen=True)
class Raised:
    """This is its one error."""

    error: BaseException


Status = UnderWay | Cancelling | Returned | Raised
UNDER_WAY = UnderWay()


def raisable(error: BaseException) -> BaseException:
    """A copy to raise of an error that is kept: the frames that it then passes through are not kept with it."""
    try:
        fresh = copy.copy(error)
    except Exception:  # not every exception of users can be copied
        return error
    fresh.__cause__, fresh.__context__ = error.__cause__, error.__context__
    fresh.__suppress_context__ = error.__suppress_context__
    return fresh if type(fresh) is type(error) else error


class WaitOver(Exception):
    """One wait for a call is over; the call is not."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error
