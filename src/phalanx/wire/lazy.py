"""Lazy import of torch: most processes that decode messages never decode a tensor."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import torch


class _Lazy(ModuleType):
    """A module that is imported at the first use of an attribute."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)
        return value


def lazy(name: str) -> ModuleType:
    """Return the module ``name``, which is imported at the first use of an attribute."""
    return _Lazy(name)


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether ``value`` is a tensor. Does not import torch: without torch there are no tensors."""
    # While torch itself is being imported, it has no Tensor yet.
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and issubclass(type(value), tensor)
