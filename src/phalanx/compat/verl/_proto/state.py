"""How a batch is pickled: each tensor with its own bytes only, or as arrays of bytes."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from phalanx.compat.verl._proto.serial import deserialize_tensordict, serialize_tensordict

_METHOD = "VERL_DATAPROTO_SERIALIZATION_METHOD"


def packed(batch: TensorDict | None) -> Any:
    """What is pickled of the tensors: themselves, or with VERL_DATAPROTO_SERIALIZATION_METHOD=numpy their bytes.

    A tensor that is a view of a larger memory is copied, because pickle would write that memory whole.
    """
    if batch is None:
        return None
    if os.environ.get(_METHOD, "").lower() == "numpy":
        return serialize_tensordict(batch)
    return _compact(batch)


def unpacked(held: Any) -> TensorDict | None:
    """The tensors again; also from the bytes that verl's own DataProto leaves in files."""
    if held is None or isinstance(held, TensorDict):
        return held
    if isinstance(held, bytes):
        return torch.load(io.BytesIO(held), weights_only=False, map_location="cpu")
    return deserialize_tensordict(held)


def save(data: Any, filepath: str | Path) -> None:
    """Pickle ``data`` into a file."""
    with open(filepath, "wb") as file:
        pickle.dump(data, file)


def load(filepath: str | Path) -> Any:
    """What was pickled into a file."""
    with open(filepath, "rb") as file:
        return pickle.load(file)


def _compact(batch: TensorDict) -> TensorDict:
    replaced: dict[str, Any] = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor) and _is_part(value):
            replaced[key] = value.detach().clone().requires_grad_(value.requires_grad)
        elif isinstance(value, TensorDict):
            inner = _compact(value)
            if inner is not value:
                replaced[key] = inner
    if not replaced:
        return batch
    copy = batch.copy()
    for key, value in replaced.items():
        copy.set(key, value)
    return copy


def _is_part(tensor: torch.Tensor) -> bool:
    held: Any = tensor.values() if tensor.is_nested and tensor.layout is torch.jagged else tensor
    return not held.is_nested and held.untyped_storage().nbytes() > held.numel() * held.element_size()
