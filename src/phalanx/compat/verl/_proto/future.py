"""Batches that are not here yet, and what can be cut and joined."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict

from phalanx.compat.verl._proto.data import DataProto
from phalanx.compat.verl._proto.errors import require
from phalanx.compat.verl._proto.parts import spans
from phalanx.compat.verl.utils import transferqueue_utils
from phalanx.compat.verl.utils.tensordict_utils import chunk_tensordict, concat_tensordict
from phalanx.compat.verl.utils.transferqueue_utils import BatchMeta, KVBatchMeta

_HOME = "phalanx.compat.verl.protocol"


@dataclass
class DataProtoFuture:
    """The outputs of several ranks, as Ray references, and how they become one batch.

    Passed to another call it is cut without being fetched; the worker that gets a piece fetches it.
    """

    __module__ = _HOME

    collect_fn: Callable[[list[Any]], Any]
    futures: list[Any]
    dispatch_fn: Callable[[Any], Any] | None = None

    @staticmethod
    def concat(data: list[Any]) -> DataProtoFuture:
        """The rows behind the references ``data``, in order."""
        return DataProtoFuture(concat_batches, list(data))

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """``chunks`` pieces in order, whose sizes are known only when they are fetched; they may be uneven."""
        require(chunks > 0, f"a future cannot be cut into {chunks} pieces: expected at least 1")
        return [
            DataProtoFuture(self.collect_fn, self.futures, _Piece(self.dispatch_fn, index, chunks))
            for index in range(chunks)
        ]

    def get(self) -> Any:
        """Wait for the outputs, and give the batch, or the piece.

        Raises:
            Refused: an output is neither a DataProto nor a TensorDict.
            RemoteCallError: (or what else ``ray.get`` raises) a rank failed.
        """
        import ray

        outputs = ray.get(list(self.futures))
        kinds = sorted({type(one).__name__ for one in outputs if not isinstance(one, DataProto | TensorDict)})
        require(
            not kinds,
            f"outputs of type {kinds} cannot be one batch: expected a DataProto or TensorDict of each",
        )
        whole = self.collect_fn(outputs)
        return whole if self.dispatch_fn is None else self.dispatch_fn(whole)


@dataclass(frozen=True)
class _Piece:
    """One of ``chunks`` pieces of what ``before`` gives."""

    before: Callable[[Any], Any] | None
    index: int
    chunks: int

    def __call__(self, whole: Any) -> Any:
        given = whole if self.before is None else self.before(whole)
        start, stop = spans(len(given), self.chunks, uneven=True)[self.index]
        return given[start:stop]


def concat_batches(batches: Sequence[Any]) -> Any:
    """The rows of all, DataProtos or TensorDicts."""
    return BatchData(list(batches)).concat()


class BatchData:
    """One look at what can be cut by rows, or joined from a list."""

    __module__ = _HOME

    _CHUNKABLE_TYPES: tuple[type, ...] = (TensorDict, KVBatchMeta, BatchMeta)
    _CONCATABLE_TYPES: tuple[type, ...] = (TensorDict, KVBatchMeta, BatchMeta)

    def __init__(self, data: Any) -> None:
        self._data = data

    @classmethod
    def _chunkable_types(cls) -> tuple[type, ...]:
        return (*cls._CHUNKABLE_TYPES, DataProto, DataProtoFuture)

    @classmethod
    def _concatable_types(cls) -> tuple[type, ...]:
        return (*cls._CONCATABLE_TYPES, DataProto, *_reference_types())

    def is_chunkable(self) -> bool:
        """Whether it has rows that can be split."""
        return isinstance(self._data, self._chunkable_types())

    def is_concatable(self) -> bool:
        """Whether it is a list or tuple, not empty, of things whose rows can be joined."""
        known = self._concatable_types()
        return (
            isinstance(self._data, list | tuple)
            and bool(self._data)
            and all(isinstance(one, known) for one in self._data)
        )

    def chunk(self, chunks: int) -> Any:
        """The rows in ``chunks`` pieces."""
        require(self.is_chunkable(), f"a {type(self._data).__name__} has no rows that could be split")
        if isinstance(self._data, TensorDict):
            return chunk_tensordict(self._data, chunks)
        data = self._data
        if isinstance(data, KVBatchMeta):  # once, and not by each rank
            data = transferqueue_utils.kv_batch_meta2batch_meta(data)
        return data.chunk(chunks)

    def concat(self) -> Any:
        """The rows of all; of references, a `DataProtoFuture` of that.

        Raises:
            ValueError: there are none.
            Refused: they cannot be joined.
        """
        if isinstance(self._data, list | tuple) and not self._data:
            raise ValueError("Cannot concatenate an empty list of data items. Give at least one batch")
        kinds = _kinds(self._data)
        require(self.is_concatable() and len(kinds) == 1, f"values of type {kinds} cannot be joined by rows")
        first = self._data[0]
        if isinstance(first, TensorDict):
            return concat_tensordict(list(self._data))
        if isinstance(first, _reference_types()):
            return DataProtoFuture.concat(list(self._data))
        if isinstance(first, BatchMeta):
            return _joined(self._data)
        return type(first).concat(list(self._data))


def _joined(metas: Sequence[Any]) -> Any:
    """Metadata of all rows, by their keys; each setting is a list by rank."""
    settings: dict[str, list[Any]] = {}
    for meta in metas:
        for name, value in meta.extra_info.items():
            settings.setdefault(name, []).append(value)
        meta.extra_info = {}  # else joining them wants them to be equal
    whole = BatchMeta.concat(list(metas))
    whole.extra_info = settings
    return transferqueue_utils.batch_meta2kv_batch_meta(whole)


def _kinds(data: Any) -> list[str]:
    values = data if isinstance(data, list | tuple) else [data]
    return sorted({type(value).__name__ for value in values})


def _reference_types() -> tuple[type, ...]:
    """Ray's references, if this process uses Ray at all."""
    ray = sys.modules.get("ray")
    return () if ray is None else (ray.ObjectRef,)
