"""Columns of objects: the arrays in ``DataProto.non_tensor_batch``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from phalanx.compat.verl._proto.equality import same_value
from phalanx.compat.verl._proto.errors import require

Array = np.ndarray[Any, Any]
Columns = dict[str, Array]


def as_column(value: Any) -> Array:
    """An array as it is; a list, tuple or anything else as an array of objects."""
    return value if isinstance(value, np.ndarray) else np.array(value, dtype=object)


def take(columns: Mapping[str, Array], index: Any) -> Columns:
    """Rows of every column, by slice, index array or mask."""
    return {key: column[index] for key, column in columns.items()}


def repeat(columns: Mapping[str, Array], times: int, interleave: bool) -> Columns:
    """Each row ``times`` in a row, or all rows ``times`` over."""
    if interleave:
        return {key: np.repeat(column, times, axis=0) for key, column in columns.items()}
    return {key: np.tile(column, (times, *(1,) * (column.ndim - 1))) for key, column in columns.items()}


def join(parts: Sequence[Mapping[str, Array]]) -> Columns:
    """The rows of all parts, in order.

    Raises:
        Refused: the parts have not the same columns.
    """
    names = list(parts[0])
    for part in parts[1:]:
        for name in part:
            require(
                name in names,
                f"Key '{name}' is not present in the keys of the first dictionary in the list. The first of the parts "
                f"to be joined has {names}",
            )
        missing = [name for name in names if name not in part]
        require(not missing, f"columns {missing} are not in every part that is to be joined")
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def union_numpy_dict(tensor_dict1: Columns, tensor_dict2: Columns) -> Columns:
    """``tensor_dict1``, changed in place: with the columns of ``tensor_dict2`` too.

    Raises:
        Refused: a column that both have is no array, or not equal in both (dtype and shape included; NaN
            equals NaN); nothing is changed then.
    """
    require_union(tensor_dict1, tensor_dict2)
    tensor_dict1.update(tensor_dict2)
    return tensor_dict1


def require_union(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Refuse unless the two sets of columns can be put together."""
    common = [key for key in other if key in one]
    for key in common:
        arrays = isinstance(one[key], np.ndarray) and isinstance(other[key], np.ndarray)
        require(arrays, f"column {key!r} must be a numpy array on both sides of a union")
    unlike = [key for key in common if not same_value(one[key], other[key])]
    require(
        not unlike,
        f"`{', '.join(unlike[:1])}` in tensor_dict1 and tensor_dict2 are not the same object. Both sides of a union "
        f"have {unlike}, with other values: drop or rename them in one",
    )


def repeat_counts(times: Any, rows: int) -> torch.Tensor:
    """How often each row is wanted, from a list, tuple, array or tensor.

    Raises:
        Refused: another type, or not one number per row.
    """
    kinds = list | tuple | np.ndarray | torch.Tensor
    require(
        isinstance(times, kinds),
        f"repeat_times type must be in [list, torch.Tensor, np.ndarray, tuple], got {type(times)}",
    )
    counts = torch.as_tensor(times)
    require(
        tuple(counts.shape) == (rows,),
        f"repeat_times must have one number for each of the {rows} rows, but has shape {tuple(counts.shape)}",
    )
    return counts
