"""What is in a batch, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tensordict import TensorDict

_GB = 1 << 30


def sizes(batch: TensorDict | None, arrays: Mapping[str, np.ndarray[Any, Any]], prefix: str) -> str:
    """Sizes of the tensors and of the arrays, in GB of 2**30 bytes."""
    held = (
        sum(value.nbytes for value in batch.values() if hasattr(value, "nbytes")) if batch is not None else 0
    )
    objects = sum(array.nbytes for array in arrays.values())
    text = f"Size of tensordict: {held / _GB} GB, size of non_tensor_batch: {objects / _GB} GB"
    return f"{prefix}, {text}" if prefix else text


def described(
    batch: TensorDict | None, arrays: Mapping[str, np.ndarray[Any, Any]], meta: Mapping[str, Any]
) -> str:
    """One line for each key of each part, under the name of the part."""
    held = {} if batch is None else dict(batch.items())
    parts = (
        ("batch", {key: _of_tensor(value) for key, value in held.items()}),
        ("non_tensor_batch", {key: _of(value) for key, value in arrays.items()}),
        ("meta_info", {key: _of(value) for key, value in meta.items()}),
    )
    return "\n".join(
        line for name, lines in parts for line in (name, *(f"  {k}: {v}" for k, v in lines.items()))
    )


def _of_tensor(value: Any) -> str:
    if not hasattr(value, "dtype"):
        return type(value).__name__
    return f"{tuple(value.shape)} ({value.dtype}) {value.device}"


def _of(value: Any) -> str:
    """The type of a value, and of what it holds: of all in a tuple, each kind in a list, the first in a dict."""
    if isinstance(value, np.ndarray):
        return f"ndarray{value.shape} ({value.dtype})"
    if isinstance(value, list):
        return f"list[{'|'.join(dict.fromkeys(map(_of, value))) or '...'}]"
    if isinstance(value, tuple):
        return f"tuple({', '.join(map(_of, value))})"
    if isinstance(value, dict) and value:
        key, held = next(iter(value.items()))
        return f"dict[{_of(key)}: {_of(held)}]"
    return type(value).__name__
