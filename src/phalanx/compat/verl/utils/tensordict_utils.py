"""Functions over TensorDicts that hold tensors, nested tensors, objects by row, and values of the whole batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData, NonTensorStack

from phalanx.compat.verl._proto import ragged, tensors
from phalanx.compat.verl._proto.equality import same_value
from phalanx.compat.verl._proto.errors import Refused, require
from phalanx.compat.verl._proto.iterate import iterate, require_whole
from phalanx.compat.verl._proto.parts import spans
from phalanx.compat.verl._proto.tensors import union_tensor_dict

__all__ = [
    "assert_tensordict_eq",
    "assign_non_tensor",
    "assign_non_tensor_data",
    "assign_non_tensor_stack",
    "chunk_tensordict",
    "concat_nested_tensors",
    "concat_tensordict",
    "concat_tensordict_with_none_bsz",
    "contiguous",
    "get",
    "get_keys",
    "get_non_tensor_data",
    "get_tensordict",
    "index_select_tensor_dict",
    "list_of_dict_to_tensordict",
    "make_iterator",
    "maybe_fix_3d_position_ids",
    "nested_tensor_from_tensor_list",
    "pad_to_divisor",
    "pop",
    "pop_keys",
    "union_tensor_dict",
    "unpad",
    "unwrap_non_tensor_data",
]


def get_tensordict(tensor_dict: dict[str, Any], non_tensor_dict: dict[str, Any] | None = None) -> TensorDict:
    """A TensorDict of columns (tensors, or lists and arrays of one object per row) and values of the whole batch.

    Raises:
        Refused: row counts differ, a column is of another type or a list of tensors, or a key is in both dicts.
    """
    held: dict[str, Any] = {}
    rows: dict[str, int] = {}
    for key, value in tensor_dict.items():
        held[key] = column = _column(key, value)
        rows[key] = column.size(0) if isinstance(column, torch.Tensor) else column.batch_size[0]
    size = list(rows.values())[:1]
    for key, count in rows.items():
        kind = "NonTensorStack" if isinstance(tensor_dict[key], NonTensorStack) else "tensor"
        require(
            [count] == size,
            f"Batch size of {kind} {key} is not consistent with other tensors. Expected {size[0]}, got {count}; all of "
            f"them: {rows}",
        )
    for key, value in (non_tensor_dict or {}).items():
        require(key not in held, f"key {key!r} is both a column and a value of the whole batch: rename one")
        held[key] = _wrapped(value, size)
    return TensorDict(held, batch_size=size)


def _column(key: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if not value.dim():
            raise IndexError(f"column {key!r} is a tensor without dims: expected one row per dim 0")
        _require_jagged(value)
        return value
    if isinstance(value, NonTensorStack):
        return value
    kinds = list | np.ndarray
    require(
        isinstance(value, kinds),
        f"{key} -> {type(value)} isn't of 'torch.Tensor | list | np.ndarray' type",
    )
    return tensors.stack_of(list(value))


def _wrapped(value: Any, size: Sequence[int]) -> Any:
    if isinstance(value, NonTensorStack):
        return value
    return NonTensorData(value.data if isinstance(value, NonTensorData) else value, batch_size=size)


def list_of_dict_to_tensordict(list_of_dicts: Sequence[dict[str, Any]]) -> TensorDict:
    """One row per dict: tensors of one shape stacked, others nested, anything else as objects by row.

    Raises:
        Refused: there are no dicts.
        KeyError: a later dict lacks a key of the first.
    """
    require(list_of_dicts, "there are no dicts to make rows of: give at least one")
    columns = {key: [one[key] for one in list_of_dicts] for key in list_of_dicts[0]}
    return get_tensordict({key: _rows_of(values) for key, values in columns.items()})


def _rows_of(values: list[Any]) -> Any:
    if not all(isinstance(value, torch.Tensor) for value in values):
        return values
    if len({value.shape for value in values}) == 1:
        return torch.stack(values)
    return ragged.nested_of(values)


def assign_non_tensor_data(tensor_dict: TensorDict, key: str, val: Any) -> None:
    """Set a value of the whole batch."""
    _require_tensordict(tensor_dict)
    tensor_dict.set(key, _wrapped(val, tensor_dict.batch_size))


def assign_non_tensor_stack(tensor_dict: TensorDict, key: str, val: Sequence[Any]) -> None:
    """Set a column of one object per row.

    Raises:
        Refused: there are not as many objects as rows.
    """
    _require_tensordict(tensor_dict)
    values, rows = list(val), tensors.row_count(tensor_dict)
    require(len(values) == rows, f"column {key!r} has {len(values)} objects for a batch of {rows} rows")
    tensor_dict.set(key, tensors.stack_of(values))


def assign_non_tensor(tensor_dict: TensorDict, **kwargs: Any) -> TensorDict:
    """``tensor_dict``, changed in place: with lists as columns of objects and anything else as values."""
    _require_tensordict(tensor_dict)
    for key, value in kwargs.items():
        if isinstance(value, list):
            assign_non_tensor_stack(tensor_dict, key, value)
        else:
            assign_non_tensor_data(tensor_dict, key, value)
    return tensor_dict


def unwrap_non_tensor_data(data: Any) -> Any:
    """The value in a NonTensorData; anything else as it is."""
    return data.data if isinstance(data, NonTensorData) else data


def get_non_tensor_data(data: TensorDict, key: str, default: Any) -> Any:
    """What is under ``key``, a value of the whole batch unwrapped; ``default`` where there is nothing."""
    return unwrap_non_tensor_data(data.get(key)) if key in data.keys() else default  # noqa: SIM118


def get(tensordict: TensorDict, key: str, default: Any = None) -> Any:
    """The tensor, the list of objects by row, or the value under ``key``; ``default`` where there is nothing."""
    return tensors.python_value(tensordict.get(key)) if key in tensordict.keys() else default  # noqa: SIM118


def get_keys(tensordict: TensorDict, keys: Iterable[str]) -> TensorDict:
    """The columns and values under ``keys``, in that order.

    Raises:
        KeyError: one of them is not there.
    """
    wanted = list(keys)
    for key in wanted:
        if key not in tensordict.keys():  # noqa: SIM118
            raise KeyError(f"key {key} not in tensordict, which has {list(tensordict.keys())}")
    held = {key: tensordict.get(key) for key in wanted}
    return TensorDict(held, batch_size=tensordict.batch_size, device=tensordict.device)


def pop(tensordict: TensorDict, key: str, default: Any = None) -> Any:
    """As `get`, and taken out."""
    found = get(tensordict, key, default)
    if key in tensordict.keys():  # noqa: SIM118
        tensordict.del_(key)
    return found


def pop_keys(tensordict: TensorDict, keys: Iterable[str]) -> TensorDict:
    """As `get_keys`, and taken out; if a key is missing, nothing is."""
    found = get_keys(tensordict, keys)
    for key in found.keys():  # noqa: SIM118
        tensordict.del_(key)
    return found


def chunk_tensordict(td: TensorDict, chunks: int) -> tuple[TensorDict, ...]:
    """The rows in ``chunks`` equal pieces, in order, as views.

    Raises:
        Refused: ``td`` is no TensorDict, or its rows do not divide evenly.
    """
    refusal = f"expecting td with length divisible by chunks, but got {len(td)} and {chunks}"
    require(isinstance(td, TensorDict), f"{refusal}: td is a {type(td).__name__}")
    pieces = spans(tensors.row_count(td), chunks, uneven=False, refusal=refusal)
    return tuple(tensors.slice_rows(td, *piece) for piece in pieces)


def index_select_tensor_dict(batch: TensorDict, indices: torch.Tensor | list[int]) -> TensorDict:
    """Rows by number, repeats allowed, or by a mask."""
    return tensors.take_rows(batch, tensors.as_indices(indices, tensors.row_count(batch)))


def concat_tensordict(data: Sequence[TensorDict]) -> TensorDict:
    """The rows of all, in order; values of the whole batch are those of the first.

    Raises:
        Refused: there are none.
        KeyError: their keys differ.
    """
    return tensors.join_rows(list(data))


def concat_tensordict_with_none_bsz(data: Sequence[TensorDict]) -> TensorDict:
    """The first of several TensorDicts that have no batch dim, and so only values of the whole batch."""
    sized = [list(one.batch_size) for one in data if len(one.batch_size)]
    require(data and not sized, f"expected TensorDicts without batch dims, but got batch sizes {sized}")
    return data[0]


def concat_nested_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all nested tensors, in order."""
    return ragged.join_nested(tensors)


def nested_tensor_from_tensor_list(
    tensors: Sequence[torch.Tensor], ragged_idx: int | None = None
) -> torch.Tensor:
    """A jagged tensor of the given rows; ``ragged_idx`` is the dim, counted with the row dim, in which they differ."""
    return ragged.nested_of(tensors, ragged_idx)


def make_iterator(
    tensordict: TensorDict,
    mini_batch_size: int,
    epochs: int,
    seed: int | None = None,
    dataloader_kwargs: dict[str, Any] | None = None,
) -> Iterator[TensorDict]:
    """Mini-batches, all rows once per epoch, in the order of ``torch.utils.data.DataLoader``.

    Raises:
        Refused: the rows do not fill whole mini-batches.
    """
    rows = tensors.row_count(tensordict)
    require_whole(rows, mini_batch_size)

    def select(indices: list[int]) -> TensorDict:
        return index_select_tensor_dict(tensordict, indices)

    return iterate(rows, select, mini_batch_size, epochs, seed, dataloader_kwargs)


def assert_tensordict_eq(tensordict1: TensorDict, tensordict2: TensorDict) -> None:
    """Refuse TensorDicts that differ: in keys, in the kind of what is under one, in shape or in content."""
    keys, others = set(tensordict1.keys()), set(tensordict2.keys())
    require(
        keys == others,
        f"key set diffs. Got tensordict2_key_set={others!r} vs tensordict1_key_set={keys!r}; not in both are "
        f"{sorted(keys ^ others)}",
    )
    for key in keys:
        one, other = tensordict1.get(key), tensordict2.get(key)
        kinds = (type(tensordict1[key]), type(tensordict2[key]))
        require(kinds[0] is kinds[1], f"The type of {key} must be the same. Got {kinds[0]} vs {kinds[1]}")
        if isinstance(one, torch.Tensor) and one.is_nested:
            _require_same_rows(key, one, other)
            continue
        require(_equal(one, other), f"under {key!r} the TensorDicts hold other values: {one!r} and {other!r}")


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return same_value(tensors.python_value(one), tensors.python_value(other))
    return one.shape == other.shape and bool((one == other).all())


def _require_same_rows(key: str, one: torch.Tensor, other: torch.Tensor) -> None:
    nested = f"val.is_nested={one.is_nested}, val2.is_nested={other.is_nested}"
    require(other.is_nested, f"Both tensors must be nested tensors. {nested}; they are under {key!r}")
    rows, others = one.unbind(), other.unbind()
    require(
        len(rows) == len(others),
        f"Nested tensor should have the same lengths. len(t1)={len(rows)} vs len(t2)={len(others)}; they are "
        f"under {key!r}",
    )
    for c1, c2 in zip(rows, others, strict=True):
        require(
            c1.shape == c2.shape and bool((c1 == c2).all()),
            f"Nested tensor components have different values. {c1=} vs {c2=}; they are under {key!r}",
        )


def pad_to_divisor(data: TensorDict, size_divisor: int) -> tuple[TensorDict, int]:
    """``data`` with its first rows appended up to a multiple of ``size_divisor``, and how many were.

    Raises:
        Refused: ``data`` is no TensorDict, or the divisor is below 1.
    """
    _require_tensordict(data, "data")
    require(size_divisor > 0, f"rows cannot be padded to a multiple of {size_divisor}: expected at least 1")
    rows = tensors.row_count(data)
    pad_size = -rows % size_divisor
    if not rows or not pad_size:
        return data, 0
    return tensors.take_rows(data, torch.arange(rows + pad_size) % rows), pad_size


def unpad(data: TensorDict, pad_size: int) -> TensorDict:
    """``data`` without its last ``pad_size`` rows."""
    return data if pad_size == 0 else tensors.slice_rows(data, 0, tensors.row_count(data) - pad_size)


def contiguous(data: TensorDict) -> TensorDict:
    """The same with every tensor contiguous, as another TensorDict.

    Raises:
        Refused: there is something else than tensors, objects by row and values of the whole batch.
    """
    made = data.copy()
    for key, value in data.items():
        if isinstance(value, NonTensorData | NonTensorStack):
            continue
        require(
            isinstance(value, torch.Tensor),
            f"Expect val to be a torch.Tensor. Got {type(value)}, under {key!r}",
        )
        made.set(key, value.contiguous())
    return made


def maybe_fix_3d_position_ids(data: TensorDict) -> None:
    """Make nested ``position_ids`` of several kinds, rows of (kinds, length), ragged in their length, in place.

    torch takes dim 1 for the ragged one where it cannot tell, as when all rows have one length.
    """
    held = data.get("position_ids", None)
    if (
        not isinstance(held, torch.Tensor)
        or not held.is_nested
        or held.dim() != 3
        or ragged.ragged_dim(held) == 2
    ):
        return
    jagged: Any = held
    values, offsets = jagged.values(), jagged.offsets()
    if values.shape[0] == int(offsets[-1]):
        fixed = ragged.nested_of(held.unbind(), 2)
    else:  # the values do lie along dim 2: only the note of it was lost
        fixed = torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2)
    data.set("position_ids", fixed)


def _require_tensordict(value: Any, what: str = "input dict") -> None:
    if not isinstance(value, TensorDict):
        raise Refused(f"{what} must be a TensorDict, but got a {type(value).__name__}")


def _require_jagged(value: torch.Tensor) -> None:
    if value.is_nested:
        require(
            value.is_contiguous(),
            "Nested tensors must be contiguous. Try setting layout=torch.jagged",
        )
        require(
            value.layout is torch.jagged, "Nested tensors must be jagged. Make them with layout=torch.jagged"
        )
