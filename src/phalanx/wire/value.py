"""Types of users' values."""

from __future__ import annotations

from typing import Any, TypeAlias

Value: TypeAlias = Any
"""A user's value: an argument of a call, an output, or a part. It may have any type that pickles."""

Reduced: TypeAlias = str | tuple[Any, ...]
"""The result of ``__reduce__``, by which pickle recreates an object."""
