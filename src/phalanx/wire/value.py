"""What users hand to the library and get back."""

from __future__ import annotations

from typing import Any, TypeAlias

Value: TypeAlias = Any
"""A user's value: an argument of a call, an output, or a part of one. Nothing is known of it but that it pickles."""

Reduced: TypeAlias = str | tuple[Any, ...]
"""What ``__reduce__`` gives: how pickle makes an object again."""
