"""Rows of a TensorDict: tensors, nested tensors, values of objects by row, and values of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData, NonTensorStack

from phalanx.compat.verl._proto import ragged
from phalanx.compat.verl._proto.equality import same_value
from phalanx.compat.verl._proto.errors import Refused, require

Rows = slice | list[Any] | np.ndarray[Any, Any] | torch.Tensor


def row_count(batch: TensorDict) -> int:
    """Number of rows; 0 without batch dims."""
    return int(batch.batch_size[0]) if len(batch.batch_size) else 0


def as_indices(rows: Rows, count: int | None = None) -> torch.Tensor:
    """Row numbers from a list, array or tensor of numbers or of booleans, one per row.

    Raises:
        Refused: ``rows`` has more than one dim, or booleans that are not ``count`` many.
        IndexError: ``rows`` is a tensor without dims.
    """
    indices = rows if isinstance(rows, torch.Tensor) else torch.as_tensor(np.asarray(rows))
    if not indices.dim():
        raise IndexError("rows are chosen by a tensor of one dim; take a single row by an int")
    require(indices.dim() == 1, f"indices must be a 1D tensor, but got {indices.dim()} dims")
    if indices.dtype is torch.bool:
        right = count is None or len(indices) == count
        require(right, f"a mask of {len(indices)} booleans was given for {count} rows: give one for each row")
        return indices.nonzero().flatten()
    return indices.long()


def take_rows(batch: TensorDict, indices: torch.Tensor) -> TensorDict:
    """Rows by index, as a new TensorDict."""
    nested = nested_keys(batch)
    if not nested:
        return batch[indices]
    plain = batch.exclude(*nested)[indices]
    return _with(plain, {key: ragged.take_nested(batch.get(key), indices) for key in nested}, batch)


def slice_rows(batch: TensorDict, start: int, stop: int) -> TensorDict:
    """Rows ``start`` to ``stop``, as views."""
    nested = nested_keys(batch)
    if not nested:
        return batch[start:stop]
    plain = batch.exclude(*nested)[start:stop]
    return _with(plain, {key: ragged.slice_nested(batch.get(key), start, stop) for key in nested}, batch)


def join_rows(batches: Sequence[TensorDict]) -> TensorDict:
    """The rows of all ``batches``, in order; values of the whole batch are those of the first.

    Raises:
        Refused: there are none, or other keys are nested.
        KeyError: their keys differ.
    """
    require(batches, "Must have at least one tensordict, but there are none to join")
    first = batches[0]
    if not len(first.batch_size):
        return first
    nested = [nested_keys(batch) for batch in batches]
    require(
        all(set(keys) == set(nested[0]) for keys in nested),
        f"All tensordicts must have the same set of nested tensors. Nested are {nested}, in this order",
    )
    apart = {key: ragged.join_nested([batch[key] for batch in batches]) for key in nested[0]}
    apart |= {key: value for key, value in first.items() if isinstance(value, NonTensorData)}
    if not apart:
        return torch.cat(list(batches))
    return _with(torch.cat([batch.exclude(*apart) for batch in batches]), apart, first)


def nested_keys(batch: TensorDict) -> list[str]:
    """The keys of nested tensors."""
    return [key for key, value in batch.items() if isinstance(value, torch.Tensor) and value.is_nested]


def _with(plain: TensorDict, apart: dict[str, Any], like: TensorDict) -> TensorDict:
    """Both together, with the keys in the order of ``like``."""
    held = {key: apart[key] if key in apart else plain.get(key) for key in like.keys()}  # noqa: SIM118
    held = {key: NonTensorData(v.data) if isinstance(v, NonTensorData) else v for key, v in held.items()}
    return TensorDict(held, batch_size=plain.batch_size, device=like.device)


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """``tensor_dict1``, changed in place: with the keys of ``tensor_dict2`` that it lacks.

    Raises:
        Refused: row counts differ, or a key that both have is not equal in both; nothing is changed then.
    """
    require_union(tensor_dict1, tensor_dict2)
    for key in tensor_dict2.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        if key not in tensor_dict1.keys():  # noqa: SIM118
            tensor_dict1.set(key, tensor_dict2.get(key))
    return tensor_dict1


def require_union(one: TensorDict, other: TensorDict) -> None:
    """Refuse unless the two TensorDicts can be put together."""
    require(
        one.batch_size == other.batch_size,
        f"Two tensor dict must have identical batch size. Got {one.batch_size} and {other.batch_size}: a union "
        "needs the same rows on both sides",
    )
    common = [key for key in other.keys() if key in one.keys()]  # noqa: SIM118
    unlike = [key for key in common if not _same(one.get(key), other.get(key))]
    require(
        not unlike,
        f"{', '.join(unlike[:1])} in tensor_dict1 and tensor_dict2 are not the same object: both sides of a union "
        f"have {unlike}, with other values; drop or rename them in one",
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.is_nested or other.is_nested:
            return one.is_nested and other.is_nested and ragged.equal_nested(one, other)
        return one.shape == other.shape and bool((one == other).all())
    return same_value(python_value(one), python_value(other))


def python_value(value: Any) -> Any:
    """What a TensorDict holds under a key, as the user gave it: tensor, list by row, or value."""
    if isinstance(value, NonTensorStack):
        return list(value.tolist())
    return value.data if isinstance(value, NonTensorData) else value


def stack_of(values: Sequence[Any]) -> Any:
    """One object per row, as a TensorDict holds them.

    Raises:
        Refused: there are tensors among the values.
    """
    values = list(values)
    if any(isinstance(value, torch.Tensor) for value in values):
        raise Refused(
            "Passing a list makes the data NonTensorStack, which doesn't support torch.Tensor. Please convert to numpy "
            "first, or stack the tensors, or make a nested tensor of them"
        )
    rows = [NonTensorData(value) for value in values or [None]]
    return NonTensorStack.from_list(rows)[: len(values)]


def taken_apart(
    batch: TensorDict,
) -> tuple[TensorDict | None, dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """The tensors, if any, the objects by row as arrays, and the values of the whole batch."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    values: dict[str, Any] = {}
    for key, value in batch.items():
        if isinstance(value, NonTensorStack):
            arrays[key] = np.array(value.tolist(), dtype=object)
        elif isinstance(value, NonTensorData):
            values[key] = value.data
    rest = batch.exclude(*arrays, *values)
    return None if arrays and rest.is_empty() else rest, arrays, values


def put_together(
    batch: TensorDict, arrays: dict[str, np.ndarray[Any, Any]], values: dict[str, Any]
) -> TensorDict:
    """The inverse of `taken_apart`.

    Raises:
        Refused: a key is in two of the parts.
    """
    common = {key for key in arrays if key in batch.keys()}  # noqa: SIM118
    require(not common, f"tensor_batch and non_tensor_batch have common keys {common}: rename them in one")
    whole = batch.copy()
    for key, value in [*arrays.items(), *values.items()]:
        require(key not in whole.keys(), f"key {key!r} is in two parts of the batch: rename one")  # noqa: SIM118
        whole.set(
            key, stack_of(list(value)) if key in arrays else NonTensorData(value, batch_size=batch.batch_size)
        )
    return whole
