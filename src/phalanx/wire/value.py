"""Types of users' values."""

from __future__ import annotations

import operator
from typing import Any, TypeAlias

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
