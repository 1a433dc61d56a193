"""Tensors and TensorDicts as tuples of names, shapes and arrays of bytes, for other serialisers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData, NonTensorStack

from phalanx.compat.verl._proto import ragged
from phalanx.compat.verl._proto.tensors import python_value, stack_of

Form = tuple[str, Any] | tuple[str, tuple[int, ...], Any]
_VALUE, _STACK = "value", "stack"


def serialize_single_tensor(obj: torch.Tensor) -> tuple[str, tuple[int, ...], np.ndarray[Any, Any]]:
    """Name of the dtype, shape, and the bytes as an array of uint8 (which shares the tensor's memory)."""
    flat = obj.detach().cpu().contiguous().reshape(-1)
    return str(obj.dtype).removeprefix("torch."), obj.shape, flat.view(torch.uint8).numpy()


def deserialize_single_tensor(arr: Any) -> torch.Tensor:
    """The tensor, on the CPU, in memory of its own."""
    dtype, shape, data = arr
    flat = torch.empty(memoryview(data).nbytes, dtype=torch.uint8)
    flat.numpy()[:] = np.frombuffer(data, dtype=np.uint8) if flat.numel() else ()
    return flat.view(getattr(torch, dtype)).reshape(tuple(shape))


def serialize_tensordict(batch: TensorDict) -> tuple[tuple[int, ...], str | None, dict[str, Form]]:
    """Batch size, device, and for each key its form.

    A form is what `serialize_single_tensor` gives; ``(layout, forms of the rows, ragged dim)`` for a nested
    tensor; ``("value", v)`` and ``("stack", [...])`` for objects.
    """
    device = None if batch.device is None else str(batch.device)
    forms = {key: _form(batch.get(key)) for key in batch.keys()}  # noqa: SIM118
    return tuple(batch.batch_size), device, forms


def deserialize_tensordict(arr: Any) -> TensorDict:
    """The inverse of `serialize_tensordict`.

    Raises:
        ValueError: a form has another length than those that it makes.
    """
    batch_size, device, forms = arr
    held = {key: _value(form) for key, form in forms.items()}
    return TensorDict(held, batch_size=batch_size, device=device)


def _form(value: Any) -> Any:
    if isinstance(value, NonTensorStack):
        return _STACK, python_value(value)
    if isinstance(value, NonTensorData):
        return _VALUE, value.data
    if not value.is_nested:
        return serialize_single_tensor(value)
    layout = str(value.layout).removeprefix("torch.")
    rows = [serialize_single_tensor(row) for row in value.unbind()]
    return (layout, rows) if layout != "jagged" or ragged.ragged_dim(value) == 1 else (layout, rows, 2)


def _value(form: Any) -> Any:
    if len(form) not in (2, 3):
        raise ValueError(f"Invalid tensor encoding format, expected length 2 or 3, got {len(form)}")
    kind, held, *rest = form
    if kind == _STACK:
        return stack_of(held)
    if kind == _VALUE:
        return NonTensorData(held)
    if not isinstance(held, list):
        return deserialize_single_tensor(form)
    rows = [deserialize_single_tensor(row) for row in held]
    if kind == "jagged":
        return ragged.nested_of(rows, rest[0] if rest else 1)
    return torch.nested.nested_tensor(rows)
