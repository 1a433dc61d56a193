"""The types and the decorator by which verl moves batches through TransferQueue, an optional package.

Batches travel as Ray objects here: the decorator calls the method as it is, and refuses metadata that only stand for
data in a queue.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from phalanx.compat.verl._proto.errors import Refused

__all__ = ["BatchMeta", "KVBatchMeta", "tqbridge"]

try:
    from transfer_queue import BatchMeta, KVBatchMeta  # pyright: ignore[reportMissingImports]
except ImportError:

    class BatchMeta:
        """Stands for rows in a queue; here only so that it can be imported and asked for."""

    class KVBatchMeta:
        """Stands for rows in a key-value store; here only so that it can be imported and asked for."""


def tqbridge(dispatch_mode: Any = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for worker methods, plain or async, that take batches themselves.

    Raises:
        Refused: when the method is called with a BatchMeta or KVBatchMeta.
    """

    def decorate(func: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(func):

            @functools.wraps(func)
            async def call_async(*args: Any, **kwargs: Any) -> Any:
                _refuse_metadata(func, args, kwargs)
                return await func(*args, **kwargs)

            return call_async

        @functools.wraps(func)
        def call(*args: Any, **kwargs: Any) -> Any:
            _refuse_metadata(func, args, kwargs)
            return func(*args, **kwargs)

        return call

    return decorate


def _refuse_metadata(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, BatchMeta | KVBatchMeta):
            raise Refused(
                f"{func.__name__} was given a {type(value).__name__}, which stands for rows in TransferQueue: pass the "
                "batch itself (a DataProto, a TensorDict, or the future of one); it does not go through the driver "
                "when it is a future"
            )
