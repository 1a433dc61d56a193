"""Registry of types with rows, and of the functions that count, slice and join rows. Users can extend it.

Built-in types: torch tensors (jagged nested tensors too) and numpy arrays along dim 0, lists, Arrow tables and record
batches, TensorDict and tensorclass. Subclasses are found through their MRO, and keep their type. A 0-d tensor or array
has no rows. Optional packages are never imported here: their types are identified by name.
"""

from __future__ import annotations

import copyreg
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar, cast

import numpy as np

from phalanx.errors import DispatchError
from phalanx.wire.memory import Array, concat_arrays, concat_rows, select_rows
from phalanx.wire.value import Reduced, checked_number, torch

T = TypeVar("T")


@dataclass(frozen=True)
class RowOps:
    """Operations on the rows of a type; see :func:`phalanx.data.register_row_type`.

    ``quick_take`` and ``quick_split`` replace slices and joins, if a type has faster functions.
    """

    kind: str
    count: Callable[[Any], int | None]
    slice: Callable[[Any, int, int], Any]
    concat: Callable[[list[Any]], Any]
    quick_take: Callable[[Any, Sequence[int]], Any] | None = None
    quick_split: Callable[[Any, Sequence[int]], list[Any]] | None = None

    def take(self, value: Any, indices: Sequence[int]) -> Any:
        """Return the rows at ``indices``, in that order."""
        if self.quick_take is not None:
            return self.quick_take(value, indices)
        return self.concat([self.slice(value, i, i + 1) for i in indices] or [self.slice(value, 0, 0)])

    def split(self, value: Any, sizes: Sequence[int]) -> list[Any]:
        """Return consecutive shards with ``sizes`` rows."""
        if self.quick_split is not None:
            return self.quick_split(value, sizes)
        stops = accumulate(sizes)
        return [self.slice(value, stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]


def copy_state(source: object, made: object) -> None:
    """Copy the attributes of ``source`` to ``made``, of the same class, except for cached properties."""
    cls = type(source)
    held = getattr(source, "__dict__", None)
    if held is source:  # a dict that is its own __dict__
        object.__setattr__(made, "__dict__", made)
        held = None
    for name, value in (held or {}).items():
        if not isinstance(getattr(cls, name, None), functools.cached_property):
            object.__setattr__(made, name, value)
    for name in copyreg._slotnames(cls):  # pyright: ignore[reportAttributeAccessIssue]
        if hasattr(source, name):
            object.__setattr__(made, name, getattr(source, name))


def _like(shard: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    # A shard is a new autograd leaf: it keeps the flag, but not the graph, which cannot leave this process.
    return shard.requires_grad_() if source.requires_grad else shard


def _tensor_count(tensor: torch.Tensor) -> int | None:
    return tensor.size(0) if tensor.dim() else None


def _tensor_slice(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    if tensor.is_nested:
        return _like(_nested_slice(tensor.detach(), start, stop), tensor)
    if tensor.layout is not torch.strided:
        return _tensor_take(tensor, range(start, stop))
    return _like(tensor.detach()[start:stop], tensor)


def _tensor_take(tensor: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    if tensor.is_nested:
        rows = tensor.detach().unbind()
        if not len(indices):
            return _like(_nested_slice(tensor.detach(), 0, 0), tensor)
        return _like(torch.nested.nested_tensor([rows[i] for i in indices], layout=tensor.layout), tensor)
    return _like(select_rows(tensor, indices), tensor)


def _tensor_split(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    if tensor.is_nested or tensor.layout is not torch.strided:
        stops = accumulate(sizes)
        return [_tensor_slice(tensor, stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
    # A single call for all shards: for a thousand views, a few milliseconds faster than slices.
    return [_like(shard, tensor) for shard in tensor.detach().split_with_sizes(list(sizes))]


def _tensor_concat(tensors: list[torch.Tensor]) -> torch.Tensor:
    first = tensors[0]
    if not first.is_nested:
        return concat_rows(tensors)
    rows = [row for tensor in tensors for row in tensor.detach().unbind()]
    if not rows:
        return first.detach().clone()
    return torch.nested.nested_tensor(rows, layout=first.layout)


def _nested_slice(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    if tensor.layout is not torch.jagged:
        rows = list(tensor.unbind()[start:stop])
        return torch.nested.nested_tensor(rows, dtype=tensor.dtype, device=tensor.device)
    jagged = cast("Any", tensor)
    if jagged.lengths() is not None:  # gaps between rows, which offsets do not describe
        jagged = jagged.contiguous()
    offsets: torch.Tensor = jagged.offsets()
    first, last = int(offsets[start]), int(offsets[stop])
    ragged: int = jagged._ragged_idx  # the ragged dim, along which the values are concatenated
    return torch.nested.nested_tensor_from_jagged(
        jagged.values().narrow(ragged - 1, first, last - first),
        offsets[start : stop + 1] - first,
        jagged_dim=ragged,
    )


def _array_concat(arrays: list[Array]) -> Array:
    if any(isinstance(array, np.ma.MaskedArray) for array in arrays):
        return np.ma.concatenate(arrays)
    joined, first = concat_arrays(arrays), arrays[0]
    if type(first) in (np.ndarray, np.memmap) or isinstance(joined, type(first)):
        return joined
    typed = joined.view(type(first))  # such as a recarray
    copy_state(first, typed)
    return typed


def list_like(source: list[Any], rows: list[Any]) -> list[Any]:
    """Return ``rows`` as a list of the same class and attributes as ``source``, without running code of a subclass."""
    if type(source) is list:
        return rows
    made = list.__new__(type(source))
    copy_state(source, made)
    list.extend(made, rows)
    return made


def _list_slice(rows: list[Any], start: int, stop: int) -> list[Any]:
    return list_like(rows, list.__getitem__(rows, slice(start, stop)))


def _list_take(rows: list[Any], indices: Sequence[int]) -> list[Any]:
    return list_like(rows, [list.__getitem__(rows, i) for i in indices])


def _list_concat(lists: list[list[Any]]) -> list[Any]:
    return list_like(lists[0], [row for rows in lists for row in list.__iter__(rows)])


def _arrow_concat(tables: list[Any]) -> Any:
    pyarrow = sys.modules["pyarrow"]
    as_batch = isinstance(tables[0], pyarrow.RecordBatch)
    if as_batch:
        tables = [pyarrow.Table.from_batches([batch]) for batch in tables]
    # Arrow joins without copying. A round trip through a stream copies the rows into memory of their own.
    joined, sink = pyarrow.concat_tables(tables), pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, joined.schema) as writer:
        writer.write_table(joined)
    owned = pyarrow.ipc.open_stream(sink.getvalue()).read_all()
    if not as_batch:
        return owned
    batches = owned.combine_chunks().to_batches()
    return batches[0] if batches else pyarrow.RecordBatch.from_pylist([], owned.schema)


def _arrow_take(table: Any, indices: Sequence[int]) -> Any:
    pyarrow = sys.modules["pyarrow"]
    return table.take(pyarrow.array(indices, type=pyarrow.int64()))


def _tensor_dict_take(value: Any, indices: Sequence[int]) -> Any:
    return _locked_like(value, value[torch.as_tensor(list(indices), dtype=torch.long, device=value.device)])


def _locked_like(source: Any, made: Any) -> Any:
    return made.lock_() if source.is_locked else made


_TENSOR_DICT = RowOps(
    "TensorDict",
    lambda value: int(value.batch_size[0]) if len(value.batch_size) else None,
    lambda value, start, stop: _locked_like(value, value[start:stop]),
    lambda values: _locked_like(values[0], torch.cat(values)),
    _tensor_dict_take,
)
_ARROW = RowOps(
    "Arrow table",
    lambda table: table.num_rows,
    lambda table, start, stop: table.slice(start, stop - start),
    _arrow_concat,
    _arrow_take,
)
_TENSOR = RowOps("tensor", _tensor_count, _tensor_slice, _tensor_concat, _tensor_take, _tensor_split)
_ARRAY = RowOps(
    "array",
    lambda array: array.shape[0] if array.ndim else None,
    lambda array, start, stop: array[start:stop],
    _array_concat,
    lambda array, indices: array[list(indices)],
)
_LIST = RowOps("list", list.__len__, _list_slice, _list_concat, _list_take)

_BY_TYPE: dict[type, RowOps] = {np.ndarray: _ARRAY, list: _LIST}
_BY_NAME = {
    "torch.Tensor": _TENSOR,
    "tensordict.base.TensorDictBase": _TENSOR_DICT,
    "pyarrow.lib.Table": _ARROW,
    "pyarrow.lib.RecordBatch": _ARROW,
}


@dataclass(frozen=True)
class Marker:
    """Base class of markers of arguments. A marker in any other place is sent as its value."""

    value: Any

    def __reduce__(self) -> Reduced:
        return (self.value,).__getitem__, (0,)


class Replicate(Marker):
    """Marker of a value that every rank gets complete although it has rows. The worker gets the bare value."""


def replicate(value: Any) -> Any:
    """Mark ``value`` as not to be split: every called rank gets the complete value, which is sent once.

    The result may be an argument, or an item of a tuple, dict or dataclass. The worker's method receives ``value``.
    """
    return Replicate(value)


def register_row_type(
    cls: type[T],
    *,
    count: Callable[[T], int | None],
    slice: Callable[[T, int, int], T],
    concat: Callable[[list[T]], T],
    take: Callable[[T, Sequence[int]], T] | None = None,
) -> None:
    """Register how the rows of ``cls`` and its subclasses are split and joined. Replaces an earlier registration.

    Example::

        px.data.register_row_type(
            pandas.DataFrame,
            count=len,
            slice=lambda frame, start, stop: frame.iloc[start:stop],
            concat=pandas.concat,
        )

    Args:
        cls: the type. A registered tuple, dict or dataclass type is no longer split leaf by leaf.
        count: ``count(value)`` returns the number of rows, or ``None`` for a value without rows, which is replicated.
        slice: ``slice(value, start, stop)`` returns rows ``start`` to ``stop`` (exclusive); possibly a view.
            ``start == stop`` must work.
        concat: ``concat(values)`` returns the rows of a non-empty list of values, in order. The result must not share
            memory with the values.
        take: ``take(value, indices)`` returns rows by index, with repeats; default: uses ``slice`` and ``concat``.

    Raises:
        DispatchError: if ``cls`` is not a class, or another argument is not callable.
    """
    if not isinstance(cls, type):
        raise DispatchError(f"register_row_type({cls!r}, ...): expected a class, such as pandas.DataFrame")
    for name, function in (("count", count), ("slice", slice), ("concat", concat), ("take", take or slice)):
        if not callable(function):
            raise DispatchError(
                f"register_row_type({cls.__name__}, {name}={function!r}): expected a function"
            )
    where = f"count({cls.__name__})"

    def rows(value: T) -> int | None:
        found = count(value)
        return None if found is None else checked_number(where, found, 0, error=DispatchError)

    _BY_TYPE[cls] = RowOps(cls.__name__, rows, slice, concat, take)
    _ops_of_type.cache_clear()


def ops_for(value: object) -> RowOps | None:
    """Return the row operations for the type of ``value``, or None if the type has no rows."""
    return _ops_of_type(type(value))


@functools.lru_cache(maxsize=4096)
def _ops_of_type(cls: type) -> RowOps | None:
    for base in cls.__mro__:
        ops = _BY_TYPE.get(base) or _BY_NAME.get(f"{base.__module__}.{base.__qualname__}")
        if ops is not None:
            return ops
    return _TENSOR_DICT if getattr(cls, "_is_tensorclass", False) else None
