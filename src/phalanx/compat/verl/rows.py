"""``DataProto`` as rows: whichever class it is, the native modes split and join it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.dispatch.shardable import register_shardable


def register_rows(cls: type) -> None:
    """Make a class ``DataProto``, the drop-in's or verl's own, known to dispatch."""
    register_shardable(cls, count=_count, slice=_slice, concat=cls.concat, take=_take)  # type: ignore[attr-defined]


def _count(data: Any) -> int | None:
    """Rows; a DataProto of meta_info alone has none and is replicated."""
    return None if data.batch is None and not data.non_tensor_batch else len(data)


def _slice(data: Any, start: int, stop: int) -> Any:
    return data.slice(start, stop)


def _take(data: Any, indices: Sequence[int]) -> Any:
    return data.select_idxs(list(indices))
