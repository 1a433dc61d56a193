"""Types and checks of users' values."""

from __future__ import annotations

import operator
import threading
from typing import Any, TypeAlias

from phalanx.errors import DeclarationError, DispatchError, PhalanxError

Value: TypeAlias = Any
"""A user's value of any picklable type: an argument or output of a call, or a part of a value."""

Reduced: TypeAlias = str | tuple[Any, ...]
"""Result of ``__reduce__``, from which pickle recreates an object."""


def as_integer(value: Any) -> int | None:
    """Return a Python or NumPy integer, or a tensor with a single integer, as an int; None for other values."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def checked_number(
    name: str,
    value: Value,
    least: int | None = None,
    advice: str = "",
    error: type[Exception] = DeclarationError,
) -> int:
    """Return ``value``, which may be of numpy or torch, as a whole number.

    Raises:
        Exception: ``error``, if it is not a whole number, or less than ``least``; the message ends with ``advice``.
    """
    number = as_integer(value)
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f" from {least}"
        raise error(f"{name}={value!r}: {advice or f'expected a whole number{bound}'}")
    return number


def bounded(seconds: float) -> float | None:
    """Return the seconds, or None (no limit) if no wait can be that long, such as ``float("inf")``."""
    return None if seconds > threading.TIMEOUT_MAX else seconds


def checked_timeout(timeout: Value, where: str, error: type[PhalanxError] = DispatchError) -> float | None:
    """Return a timeout in seconds; None: no limit.

    Raises:
        PhalanxError: ``error``, if the timeout is negative or not a number; the message starts with ``where``.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:  # nan
        raise error(f"{where}(timeout={timeout!r}): expected seconds, 0 or more, or None for no limit")
    return bounded(timeout)
