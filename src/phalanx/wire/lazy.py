"""torch, imported when first used: most processes that decode a message never see a tensor."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import torch


class _Lazy(ModuleType):
    """Stands for a module until one of its attributes is asked for."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)
        return value


def lazy(name: str) -> ModuleType:
    """The module of that name, imported when the first of its attributes is asked for."""
    return _Lazy(name)


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Whether ``value`` is a tensor; does not import torch, since there are no tensors before it."""
    return is_tensor_type(type(value))


def is_tensor_type(cls: type) -> bool:
    """Whether instances of ``cls`` are tensors."""
    torch = sys.modules.get("torch")
    # While torch itself is being imported it has no Tensor yet, and nobody has one.
    tensor = getattr(torch, "Tensor", None)
    return tensor is not None and issubclass(cls, tensor)
