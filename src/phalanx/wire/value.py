"""Types and checks of users' values, without an import of torch: most processes never decode a tensor."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, TypeVar

from phalanx.config import as_integer, is_number
from phalanx.errors import DeclarationError, DispatchError, PhalanxError

Choice = TypeVar("Choice", bound=str)

Value: TypeAlias = Any
"""A user's value of any picklable type: an argument or output of a call, or a part of a value."""

Dims: TypeAlias = tuple[int, ...]
"""A number for each dimension of a tensor or array: its sizes, its strides, or a position."""

Reduced: TypeAlias = str | tuple[Any, ...]
"""Result of ``__reduce__``, from which pickle recreates an object."""


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


def checked_choice(
    name: str, value: Choice, choices: Sequence[str], error: type[Exception] = DeclarationError
) -> Choice:
    """Return ``value``.

    Raises:
        Exception: ``error``, if it is none of ``choices``.
    """
    if value not in choices:
        raise error(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}")
    return value


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
    if not is_number(timeout) or not timeout >= 0:  # nan
        raise error(f"{where}(timeout={timeout!r}): expected seconds, 0 or more, or None for no limit")
    return bounded(timeout)


class _Lazy(ModuleType):
    """A module that is imported at the first use of an attribute."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)
        return value


def lazy(name: str) -> ModuleType:
    """Return the module ``name``, which is imported at the first use of an attribute."""
    return _Lazy(name)


#: For modules of types and functions that are used before, or without, torch.
if TYPE_CHECKING:
    import torch as torch
else:
    torch = lazy("torch")


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether ``value`` is a tensor. Does not import torch: without torch there are no tensors."""
    # While torch itself is being imported, it has no Tensor yet.
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and issubclass(type(value), tensor)
