"""The types and the decorator by which verl moves batches through TransferQueue, an optional package.

A method that is called with metadata (``KVBatchMeta``, ``BatchMeta``) is given the rows that they stand for, and what
it returns is put into the queue again. Without the package such a call is refused: there is nothing behind it.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from phalanx.compat.verl._proto.errors import Refused, require

__all__ = [
    "BatchMeta",
    "KVBatchMeta",
    "async_batch_meta2kv_batch_meta",
    "async_kv_batch_meta2batch_meta",
    "batch_meta2kv_batch_meta",
    "kv_batch_meta2batch_meta",
    "tqbridge",
]

try:
    import transfer_queue as tq  # pyright: ignore[reportMissingImports]
    from transfer_queue import BatchMeta, KVBatchMeta  # pyright: ignore[reportMissingImports]
except ImportError:
    tq = None

    class BatchMeta:
        """Stands for rows in a queue; here only so that it can be imported and asked for."""

    class KVBatchMeta:
        """Stands for rows in a key-value store; here only so that it can be imported and asked for."""


class _Queue:
    """The client of the queue, made when it is first used, and a loop for it beside the worker's own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def client(self) -> Any:
        """The client. Raises Refused where the package is not installed."""
        if tq is None:
            raise Refused("transfer_queue is not installed: pip install 'TransferQueue==0.1.10'")
        with self._lock:
            if not self._ready:
                tq.init()
                self._ready = True
        return tq.get_client()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Wait for some work on the client, also where a loop runs in this thread."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="phalanx-queue", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


_queue = _Queue()


async def async_kv_batch_meta2batch_meta(meta: Any) -> Any:
    """The rows of some keys, as the queue knows them."""
    client = _queue.client()
    found = await client.async_kv_retrieve_meta(keys=meta.keys, partition_id=meta.partition_id, create=False)
    if meta.fields is not None:
        found = found.select_fields([meta.fields] if isinstance(meta.fields, str) else meta.fields)
    found.extra_info = meta.extra_info
    return found


async def async_batch_meta2kv_batch_meta(meta: Any) -> Any:
    """The keys of some rows. Raises Refused where they are of several partitions."""
    client = _queue.client()
    partitions = sorted(set(meta.partition_ids))
    require(len(partitions) == 1, f"rows of the partitions {partitions} have no keys in common: expected one")
    keys = await client.async_kv_retrieve_keys(global_indexes=meta.global_indexes, partition_id=partitions[0])
    return KVBatchMeta(
        keys=keys,
        tags=[{}] * meta.size,
        partition_id=partitions[0],
        fields=meta.field_names,
        extra_info=meta.extra_info,
    )


def kv_batch_meta2batch_meta(meta: Any) -> Any:
    """As :func:`async_kv_batch_meta2batch_meta`, waited for."""
    return _queue.run(async_kv_batch_meta2batch_meta(meta))


def batch_meta2kv_batch_meta(meta: Any) -> Any:
    """As :func:`async_batch_meta2kv_batch_meta`, waited for."""
    return _queue.run(async_batch_meta2kv_batch_meta(meta))


def tqbridge(dispatch_mode: Any = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for worker methods, plain or async, that take batches.

    Args:
        dispatch_mode: that of the method; where it collects from some ranks only, the others put nothing back.

    Raises:
        Refused: by the method, when it is called with metadata and the package is not installed.
    """

    def decorate(func: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(func):

            @functools.wraps(func)
            async def call_async(*args: Any, **kwargs: Any) -> Any:
                if _first_meta(args, kwargs) is None:
                    return await func(*args, **kwargs)
                _check_package(func, args, kwargs)
                return await _bridged(func, dispatch_mode, args, kwargs)

            return call_async

        @functools.wraps(func)
        def call(*args: Any, **kwargs: Any) -> Any:
            if _first_meta(args, kwargs) is None:
                return func(*args, **kwargs)
            _check_package(func, args, kwargs)
            return _bridged_here(func, dispatch_mode, args, kwargs)

        return call

    return decorate


def _first_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return next((v for v in (*args, *kwargs.values()) if isinstance(v, BatchMeta | KVBatchMeta)), None)


def _check_package(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if tq is None:
        raise Refused(
            f"{func.__name__} was given a {type(_first_meta(args, kwargs)).__name__}, which stands for rows in "
            "TransferQueue, and transfer_queue is not installed here: pip install 'TransferQueue==0.1.10', or pass the "
            "batch itself (a DataProto, a TensorDict, or the future of one)"
        )


@dataclass(frozen=True)
class _Given:
    """The arguments with rows in place of metadata; ``meta`` and ``tags`` are those of the first."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: Any
    tags: Any
    by_keys: bool


def _bridged_here(
    func: Callable[..., Any], dispatch_mode: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    # Not in the wrapper: that is pickled with what it names where its class is of `__main__`.
    given = _queue.run(_given(args, kwargs))
    return _queue.run(_put_back(func(*given.args, **given.kwargs), given, dispatch_mode))


async def _bridged(
    func: Callable[..., Awaitable[Any]], dispatch_mode: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    given = await _given(args, kwargs)
    return await _put_back(await func(*given.args, **given.kwargs), given, dispatch_mode)


async def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Given:
    first = _first_meta(args, kwargs)
    by_keys = isinstance(first, KVBatchMeta)
    return _Given(
        args=tuple([await _rows_of(value) for value in args]),
        kwargs={name: await _rows_of(value) for name, value in kwargs.items()},
        meta=await async_kv_batch_meta2batch_meta(first) if by_keys else first,
        tags=first.tags if by_keys else None,
        by_keys=by_keys,
    )


async def _rows_of(value: Any) -> Any:
    """The rows that metadata stand for, with their settings; any other value as it is."""
    if not isinstance(value, BatchMeta | KVBatchMeta):
        return value
    from tensordict import TensorDict

    from phalanx.compat.verl.utils import tensordict_utils

    meta = await async_kv_batch_meta2batch_meta(value) if isinstance(value, KVBatchMeta) else value
    rows = await _queue.client().async_get_data(meta) if meta.size else TensorDict({}, batch_size=(0,))
    for name, setting in copy.deepcopy(meta.extra_info).items():
        if type(setting).__name__ in ("NonTensorData", "NonTensorStack"):
            rows[name] = setting
        else:
            tensordict_utils.assign_non_tensor_data(tensor_dict=rows, key=name, val=setting)
    return rows


async def _put_back(output: Any, given: _Given, dispatch_mode: Any) -> Any:
    """What stands for an output with rows, which goes into the queue; any other output as it is."""
    from tensordict import TensorDict

    rows = isinstance(output, TensorDict) and bool(output.batch_size)
    if rows:
        require(
            output.batch_size[0] == given.meta.size,
            f"output batch size {output.batch_size} != meta size {given.meta.size}: a method that is called with "
            "metadata gives a row for each of its rows",
        )
    if _collects(dispatch_mode, given.args):
        return await _stored(output, given) if rows else output
    if rows:
        return BatchMeta()
    if hasattr(output, "non_tensor_batch"):  # a DataProto, whose module imports this one
        return type(output)()
    return TensorDict({}, batch_size=(0,)) if isinstance(output, TensorDict) else output


def _collects(dispatch_mode: Any, args: tuple[Any, ...]) -> bool:
    """Whether the outputs of this rank are wanted, as the mesh says that the mode is of."""
    collect = dispatch_mode.get("collect_fn") if isinstance(dispatch_mode, dict) else None
    lazy = getattr(getattr(collect, "func", None), "__name__", "") == "collect_lazy_compute_data_proto"
    if not lazy or not collect.args or not hasattr(args[0] if args else None, "query_collect_info"):
        return True
    return args[0].query_collect_info(collect.args[0])


async def _stored(output: Any, given: _Given) -> Any:
    """Put the fields of an output beside those that the rows have; settings travel with the metadata."""
    import torch
    from tensordict.tensorclass import NonTensorData, NonTensorStack

    fields, settings = [], {}
    for name, value in output.items():
        if isinstance(value, torch.Tensor | NonTensorStack):
            fields.append(name)
        else:
            require(
                isinstance(value, NonTensorData),
                f"Unsupported type {type(value)} for key {name} in output TensorDict: expected a tensor, a "
                "NonTensorStack with a value for each row, or NonTensorData for a setting",
            )
            settings[name] = value.data
    meta = given.meta
    if fields:
        meta = await _queue.client().async_put(data=output.select(*fields), metadata=meta)
        meta.extra_info = settings
    if not given.by_keys:
        return meta
    keyed = await async_batch_meta2kv_batch_meta(meta)
    keyed.tags = given.tags
    return keyed
