"""Whole numbers as users give them: Python's own, numpy's, and those of tensors with one element."""

from __future__ import annotations

import operator
from typing import Any

__all__ = ["whole_number"]


def whole_number(given: Any) -> int | None:
    """The number that it is; None where it is none, as texts, halves and True are."""
    if isinstance(given, bool):
        return None
    try:
        return operator.index(given)
    except TypeError:
        return None
