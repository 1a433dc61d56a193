"""Steps of `DataProto` that need none of its state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from phalanx.compat.verl._proto.errors import Refused, require
from phalanx.dispatch.split import even_sizes


def tensor_dict(held: Mapping[str, Any], num_batch_dims: int) -> TensorDict:
    """A TensorDict of tensors (or arrays) that have the same first ``num_batch_dims`` dims."""
    sizes: dict[str, tuple[int, ...]] = {}
    for key, value in held.items():
        shape = getattr(value, "shape", None)
        if shape is None:
            raise Refused(f"tensors[{key!r}] is a {type(value).__name__}: expected a torch tensor")
        sizes[key] = (value.size(0),) if getattr(value, "is_nested", False) else tuple(shape[:num_batch_dims])
    pivot, size = next(iter(sizes.items()))
    unlike = next((key for key in sizes if sizes[key] != size), pivot)
    same = unlike == pivot and len(size) == num_batch_dims
    require(
        same,
        f"Not all the tensor in tensors have the same batch size with batch_dims={num_batch_dims}. Got {pivot} has "
        f"{torch.Size(size)}, {unlike} has {torch.Size(sizes[unlike])}; all of them: {sizes}",
    )
    return TensorDict(dict(held), batch_size=size)


def require_one_batch_dim(num_batch_dims: int, objects: bool, when: str) -> None:
    """Refuse a number of batch dims below 1, and another than 1 where there are ``objects``, as ``when`` says."""
    require(
        num_batch_dims > 0, f"num_batch_dims must be greater than zero, but is {num_batch_dims}: expected 1"
    )
    require(
        num_batch_dims == 1 or not objects,
        f"only support num_batch_dims=1 when {when}. It is {num_batch_dims}",
    )


def by_kind(data: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the arrays in ``data``; a ValueError where there is anything else."""
    for key, value in data.items():
        if not isinstance(value, torch.Tensor | np.ndarray):
            raise ValueError(
                f"Unsupported type in data {type(value)}, under {key!r}: expected a torch tensor or a numpy array"
            )
    held = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
    return held, {key: value for key, value in data.items() if key not in held}


def require_batch(batch: TensorDict | None, keys: Sequence[str]) -> TensorDict:
    """``batch``, or a KeyError where there is none."""
    if batch is None:
        raise KeyError(f"this DataProto holds no tensors, so there is no {list(keys)}")
    return batch


def chosen(held: Mapping[str, Any], keys: Sequence[str] | None) -> dict[str, Any]:
    """The entries under ``keys``, as far as there are any; all of them for None."""
    return {key: value for key, value in held.items() if keys is None or key in keys}


def as_keys(keys: Any) -> list[str]:
    """One key or a list of keys, as a list."""
    if isinstance(keys, str):
        return [keys]
    if not isinstance(keys, list):
        raise TypeError(f"keys must be a list or a string, but got {type(keys)}")
    return keys


def spans(rows: int, chunks: int, uneven: bool, refusal: str = "") -> list[tuple[int, int]]:
    """Start and stop of each of ``chunks`` pieces; see `DataProto.chunk`.

    Raises:
        Refused: with ``refusal``, where rows that may not be ``uneven`` do not divide.
    """
    require(chunks > 0, f"a batch cannot be cut into {chunks} pieces: expected at least 1")
    require(uneven or rows % chunks == 0, refusal)
    most = -(-rows // chunks)
    last = rows - most * (chunks - 1)
    sizes = [most] * (chunks - 1) + [last] if last > 0 else even_sizes(rows, chunks)
    return [(stop - size, stop) for stop, size in zip(accumulate(sizes), sizes, strict=True)]


def unfolded(key: str, column: Any, n_split: int) -> Any:
    """Dim 1 of a tensor or array dealt out over ``n_split`` rows for each row."""
    wide = column.shape[1] if len(column.shape) > 1 else None
    require(
        wide is not None and wide % n_split == 0,
        f"column {key!r} of shape {tuple(column.shape)} cannot be dealt out over {n_split} rows: expected a dim 1 "
        f"that divides by {n_split}",
    )
    return column.reshape(column.shape[0] * n_split, -1, *column.shape[2:])


def folded(column: Any, rows: int) -> Any:
    """``rows`` rows of equally many consecutive ones: shape (rows, k, ...)."""
    return column.reshape(rows, column.shape[0] // rows, *column.shape[1:])


def flattened(key: str, column: Any, dims: int) -> Any:
    """The first ``dims`` dims of a tensor or array as one."""
    require(
        len(column.shape) >= dims,
        f"column {key!r} of shape {tuple(column.shape)} does not have the {dims} batch dims to unfold",
    )
    rows = 1
    for size in column.shape[:dims]:
        rows *= size
    return column.reshape(rows, *column.shape[dims:])


def stacked(batches: Sequence[TensorDict | None]) -> TensorDict | None:
    """One row of each as a TensorDict of rows; None where no row has tensors."""
    held = [batch for batch in batches if batch is not None]
    require(
        len(held) in (0, len(batches)),
        f"{len(batches) - len(held)} of {len(batches)} rows have no tensors: expected tensors in all or none",
    )
    return torch.stack(held).contiguous() if held else None


def require_keys(part: str, held: Collection[str], keys: Sequence[str] | None) -> None:
    """Refuse ``keys`` that a part of the batch does not hold, and that are to be taken out of it."""
    missing = [key for key in keys or () if key not in held]
    require(not missing, f"{part} has no {missing} that could be popped, only {sorted(held, key=str)}")


def renamed(batch: TensorDict | None, old: Sequence[str], new: Sequence[str]) -> TensorDict:
    """``batch`` with other keys, which come last in their order.

    Raises:
        ValueError: there are not as many new keys as old ones.
        KeyError: an old key is not there.
    """
    if len(old) != len(new):
        raise ValueError(
            f"new_keys and old_keys must have the same length, but got {len(new)} and {len(old)}: {new} and {old}"
        )
    batch = require_batch(batch, old)
    missing = [key for key in old if key not in batch.keys()]  # noqa: SIM118 - a TensorDict iterates over rows
    if missing:
        raise KeyError(f"batch has no {missing} that could be renamed, only {list(batch.keys())}")
    held = [batch.get(key) for key in old]
    rest = batch.exclude(*old)
    for key, value in zip(new, held, strict=True):
        rest.set(key, value)
    return rest
