"""Types of users' values."""

from __future__ import annotations

import operator
from typing import Any, TypeAlias

Value: TypeAlias = Any
"""A user's value: an argument of a call, an output, or a part. It may have any type that pickles."""

Reduced: TypeAlias = str | tuple[Any, ...]
"""The result of ``__reduce__``, by which pickle recreates an object."""


def as_integer(value: Any) -> int | None:
    """Return an integer of Python, numpy, or a tensor with a single element, as an int; None for other values."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
