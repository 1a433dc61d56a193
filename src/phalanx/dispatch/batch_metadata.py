"""Leaves without rows: the settings of a batch, and values that differ between shards or cannot be compared.

A batch passes from role to role with its settings: every rank gets an unchanged number, string or path, and the result
has the value once if it is equal in all shards. Only plain values can be compared by their contents in any process.
Other values, and plain values that differ, are returned as a :class:`PerShard`.
"""

from __future__ import annotations

import datetime
import enum
import hashlib
import math
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any, TypeVar, overload
from uuid import UUID

import numpy as np

from phalanx.wire.value import is_tensor, torch

T_co = TypeVar("T_co", covariant=True)

#: Comparison key of a plain value: equal in any process for equal values of the same type (1 and True differ).
Key = tuple[Any, ...]

#: Path and digest of each leaf without rows; the digest is empty if the leaf is not a plain value.
Settings = tuple[tuple[str, bytes], ...]

#: Digest of values that are refused if rows are split, even if there is a single shard.
UNCLEAR = b"-"


class PerShard(Sequence[T_co]):
    """Values of a leaf of a result that has no rows and is not equal in all shards: a value per shard, in order.

    For example, a method with ``ROWS`` or a mesh returned a different number from each rank. A PerShard is a sequence,
    but never rows: a method that splits rows refuses it in a batch, since the intended value is unknown.
    """

    def __init__(self, values: Iterable[T_co]) -> None:
        self._values = tuple(values)

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T_co, ...]: ...
    def __getitem__(self, index: int | slice) -> T_co | tuple[T_co, ...]:
        return self._values[index]

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        return self._values == other._values if isinstance(other, PerShard) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._values)

    def __repr__(self) -> str:
        return f"PerShard({list(self._values)!r})"


def one_or_by_shard(values: Sequence[Any]) -> Any:
    """Return the first value if all values are equal plain values or it is the only value; else a PerShard."""
    if len(values) == 1:
        return values[0]
    first = plain_key(values[0])
    alike = first is not None and all(plain_key(value) == first for value in values[1:])
    return values[0] if alike else PerShard(values)


def digest(value: object) -> bytes:
    """Return a digest that is equal for equal plain values in any process.

    It is empty for other values, and ``UNCLEAR`` for values that are refused if rows are split.
    """
    if isinstance(value, PerShard) or is_table_like(value):
        return UNCLEAR
    key = plain_key(value)
    return b"" if key is None else hashlib.blake2b(repr(key).encode(), digest_size=8).digest()


def differing(shards: Sequence[Settings]) -> list[str]:
    """Return the paths of leaves that are joined as a PerShard or are unclear, in the order of the first shard."""
    known = [dict(shard) for shard in shards]
    paths = dict.fromkeys(path for shard in known for path in shard)
    return [path for path in paths if not _agree([shard.get(path) for shard in known])]


def _agree(digests: Sequence[bytes | None]) -> bool:
    first = digests[0]
    plain = bool(first) or len(digests) == 1  # the value of a single shard need not be plain
    return first != UNCLEAR and plain and all(each == first for each in digests)


def plain_key(value: object) -> Key | None:
    """Return the comparison key of a plain value; None for other values.

    Plain values are numbers (nan equals nan), strings, bytes, None, enum members, dates, paths, named functions and
    classes, 0-d tensors and arrays, dtypes, devices, and ranges, slices and sets of plain values.
    """
    cls = type(value)
    name = f"{cls.__module__}.{cls.__qualname__}"
    tell = _TELLS.get(cls)
    if tell is not None:
        return name, tell(value)
    if isinstance(value, _TOLD_BY_TEXT) or name in _TORCH_TOLD_BY_TEXT:
        return name, repr(value)
    if isinstance(value, enum.Enum):
        return name, value.name, plain_key(value.value)
    if isinstance(value, np.generic | np.ndarray):
        return _array_key(name, value)
    if is_tensor(value):
        return _tensor_key(name, value)
    if isinstance(value, slice):
        return _keys(name, (value.start, value.stop, value.step))
    if isinstance(value, set | frozenset):
        keys = _keys(name, value)
        return keys and tuple(sorted(map(repr, keys)))
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        local = "<" in value.__qualname__
        return None if local else (name, value.__module__, value.__qualname__)
    return None


def _float(value: float) -> str:
    return "nan" if math.isnan(value) else float.hex(value + 0.0)  # + 0.0 makes -0.0 equal to 0.0


_TELLS: dict[type, Callable[[Any], Any]] = {
    NoneType: bool,
    bool: bool,
    int: hex,  # unlike str, without a limit of digits
    float: _float,
    complex: lambda value: (_float(value.real), _float(value.imag)),
    str: str,
    bytes: bytes,
}
_TOLD_BY_TEXT = (
    *(datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(Decimal, Fraction, PurePath, UUID, range, np.dtype),
)
_TORCH_TOLD_BY_TEXT = frozenset({"torch.dtype", "torch.device", "torch.Size", "torch.layout"})


def _array_key(name: str, value: np.generic | np.ndarray[Any, Any]) -> Key | None:
    if value.ndim or value.dtype.hasobject:
        return None
    plain = value.dtype.kind in "biuf" and value.dtype.itemsize <= 8
    return name, value.dtype.str, plain_key(value.item()) if plain else value.tobytes()


def _tensor_key(name: str, value: Any) -> Key | None:
    if value.dim() or value.layout is not torch.strided or value.device.type == "meta" or value.is_quantized:
        return None
    return name, str(value.dtype), plain_key(value.detach().item())


def _keys(name: str, values: Iterable[object]) -> Key | None:
    keys = [plain_key(value) for value in values]
    return None if None in keys else (name, *keys)


_TABLE_MARKS = (
    *("__dataframe__", "__arrow_c_array__", "__arrow_c_stream__", "__array__", "__array_interface__"),
    *("__cuda_array_interface__", "iloc", "num_rows"),
)


def is_table_like(value: object) -> bool:
    """Return whether a leaf of an unknown type looks like rows: a DataFrame, an Arrow array, a deque."""
    cls = type(value)
    if cls in _TELLS or isinstance(value, type | np.generic | np.ndarray | bytearray) or is_tensor(value):
        return False
    if isinstance(value, MutableSequence):
        return True
    return any(hasattr(cls, mark) for mark in _TABLE_MARKS) and getattr(value, "ndim", 1) != 0
