"""Whether two values of any Python types are the same, arrays and tensors inside included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def same_value(one: Any, other: Any) -> bool:
    """Whether both are of one type and equal: NaN equals NaN, containers are compared element by element."""
    return _same(one, other, set())


def _same(one: Any, other: Any, met: set[tuple[int, int]]) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    pair = (id(one), id(other))
    if pair in met:  # met on the way down: a cycle, which differs nowhere unless elsewhere
        return True
    if isinstance(one, torch.Tensor):
        return _same_tensor(one, other)
    if isinstance(one, np.ndarray):
        return _same_array(one, other, met | {pair})
    if isinstance(one, Mapping):
        inside = met | {pair}
        return one.keys() == other.keys() and all(_same(one[key], other[key], inside) for key in one)
    if isinstance(one, list | tuple):
        inside = met | {pair}
        return len(one) == len(other) and all(_same(a, b, inside) for a, b in zip(one, other, strict=True))
    return _same_atom(one, other)


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_nested or other.is_nested:
        rows, others = one.unbind(), other.unbind()
        return len(rows) == len(others) and all(map(_same_tensor, rows, others))
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    return bool(torch.eq(one, other).logical_or((one != one).logical_and(other != other)).all())


def _same_array(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any], met: set[tuple[int, int]]) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype != object:
        return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fcmM"))
    return all(_same(a, b, met) for a, b in zip(one.flat, other.flat, strict=True))


def _same_atom(one: Any, other: Any) -> bool:
    try:
        return bool(one == other) or bool(one != one and other != other)
    except (ValueError, RuntimeError):  # a type whose comparison gives no single truth
        return False
