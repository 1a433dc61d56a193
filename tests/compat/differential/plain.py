"""What both sides of a comparison are turned into: plain lists, numbers and strings that JSON can hold."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import os
import signal
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData, NonTensorStack

PREFIX = os.environ.get("COMPAT_PREFIX", "phalanx.compat.verl")
"""``verl`` where the installed peer is looked at, ``phalanx.compat.verl`` where we are."""


def load(name: str) -> Any:
    """The module ``name`` of the library under comparison, such as ``protocol``."""
    return importlib.import_module(f"{PREFIX}.{name}")


def plain(value: Any) -> Any:
    """``value`` as nested lists that say type, dtype, shape and content."""
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value)
    if isinstance(value, np.ndarray):
        return ["array", str(value.dtype), list(value.shape), plain(value.tolist())]
    if isinstance(value, NonTensorData):
        return ["non-tensor", plain(value.data)]
    if isinstance(value, NonTensorStack):
        return ["non-tensor stack", plain(value.tolist())]
    if isinstance(value, TensorDict):
        held = [[key, plain(value.get(key))] for key in sorted(value.keys())]
        return ["tensordict", list(value.batch_size), held]
    if type(value).__name__ in ("DataProto", "DataProtoItem"):
        parts = (value.batch, value.non_tensor_batch, value.meta_info)
        return [type(value).__name__, *map(plain, parts)]
    return _plain_python(value)


def _plain_python(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): plain(held) for key, held in value.items()}
    if isinstance(value, torch.Size | list | tuple | range):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, *map(plain, value)]
    if isinstance(value, bool | int | float | str | type(None)):
        return value
    if isinstance(value, np.generic):
        return [str(value.dtype), value.item()]
    if isinstance(value, type | torch.dtype | torch.device):
        return str(value)
    return f"<{type(value).__name__}>"


def _plain_tensor(value: torch.Tensor) -> Any:
    if value.is_nested:
        kind = "jagged" if value.layout == torch.jagged else "strided"
        rows = [_plain_tensor(row) for row in value.unbind()]
        return ["nested", kind, rows]
    return ["tensor", str(value.dtype), list(value.shape), value.tolist()]


@contextlib.contextmanager
def within(seconds: int) -> Generator[None]:
    """Raises TimeoutError in the main thread when what is inside takes longer."""

    def ring(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt  # the only one that ends Ray's waiting

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    except KeyboardInterrupt:
        raise TimeoutError(f"not done within {seconds} s") from None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def attempt(action: Callable[[], Any], seconds: int = 60) -> Any:
    """What ``action`` gives, or the builtin exception type that it raises; TimeoutError if it takes too long."""
    try:
        with within(seconds):
            return plain(action())
    except Exception as error:
        known = [c.__name__ for c in type(error).__mro__ if getattr(builtins, c.__name__, None) is c]
        if os.environ.get("COMPAT_VERBOSE"):
            return ["raises", known[0], type(error).__name__, str(error)[:200]]
        return ["raises", known[0]]
