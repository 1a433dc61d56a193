"""Which values have rows, and how rows are counted, cut and joined: a registry that users extend.

Known from the start: torch tensors (jagged nested ones too) and numpy arrays along dim 0, lists, Arrow tables
and record batches, TensorDict and tensorclass. Subclasses are found through their MRO. A 0-d tensor or array
has no rows. Optional packages are never imported here: their types are known by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from phalanx.dispatch.rowtypes import BUILT_IN, BUILT_IN_BY_NAME, TENSOR_DICT, RowOps, make_ops
from phalanx.errors import DispatchError

T = TypeVar("T")


@dataclass(frozen=True)
class Replicate:
    """A value that every rank gets whole, although it has rows; the worker sees the value itself."""

    value: Any


def replicate(value: Any) -> Any:
    """Exempt ``value`` from being split or dealt: every called rank gets it whole, and it is sent once.

    It may be an argument, or stand inside a tuple, dict or dataclass. The worker's method receives ``value``.
    """
    return Replicate(value)


_BY_TYPE: dict[type, RowOps] = dict(BUILT_IN)


def register_shardable(
    cls: type[T],
    *,
    count: Callable[[T], int | None],
    slice: Callable[[T, int, int], T],
    concat: Callable[[list[T]], T],
    take: Callable[[T, Sequence[int]], T] | None = None,
) -> None:
    """Teach dispatch and collect the rows of ``cls`` and its subclasses; a later registration replaces.

    Example::

        px.register_shardable(
            pandas.DataFrame,
            count=len,
            slice=lambda frame, start, stop: frame.iloc[start:stop],
            concat=pandas.concat,
        )

    Args:
        cls: the type. A tuple, dict or dataclass type registered here is no longer taken leaf by leaf.
        count: number of rows, or ``None`` for a value that has none (it is then replicated).
        slice: rows ``start`` to ``stop`` (exclusive), in order; may be a view. ``start == stop`` must work.
        concat: the rows of a non-empty list of values, in order. The result must not share memory with them.
        take: rows by index, repeats allowed; left out, it is made of ``slice`` and ``concat``.

    Raises:
        DispatchError: ``cls`` is not a class, or one of the functions is not callable.
    """
    if not isinstance(cls, type):
        raise DispatchError(f"register_shardable({cls!r}, ...): expected a class, such as pandas.DataFrame")
    for name, function in (("count", count), ("slice", slice), ("concat", concat)):
        if not callable(function):
            raise DispatchError(
                f"register_shardable({cls.__name__}, {name}={function!r}): expected a function"
            )
    _BY_TYPE[cls] = make_ops(cls.__name__, count, slice, concat, take)
    _ops_of_type.cache_clear()


def ops_for(value: object) -> RowOps | None:
    """The row operations for ``value``, or None where its type has no rows."""
    return _ops_of_type(type(value))


@functools.lru_cache(maxsize=4096)
def _ops_of_type(cls: type) -> RowOps | None:
    for base in cls.__mro__:
        ops = _BY_TYPE.get(base) or BUILT_IN_BY_NAME.get(f"{base.__module__}.{base.__qualname__}")
        if ops is not None:
            return ops
    return TENSOR_DICT if getattr(cls, "_is_tensorclass", False) else None
