"""Helpers around Ray."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from phalanx.compat.verl._proto.errors import require
from phalanx.topology.accelerators import ACCELERATORS

__all__ = ["auto_await", "get_event_loop", "parallel_put", "ray_noset_visible_devices"]

# Ray's manager for AMD reads this one too.
_NOSET = frozenset([kind.noset for kind in ACCELERATORS] + ["RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES"])
_MOST_THREADS = 16


def ray_noset_visible_devices(env_vars: Mapping[str, str] = os.environ) -> bool:
    """Whether Ray is told to leave a variable that masks devices alone."""
    return any(env_vars.get(name) for name in _NOSET)


def parallel_put(data_list: Sequence[Any], max_workers: int | None = None) -> list[Any]:
    """One Ray reference for each value, put by several threads; ``ray.get`` of one gives the value.

    Tensors and arrays inside are stored as they lie in memory, so that a view of a large tensor takes only its own
    bytes.

    Raises:
        Refused: there are no values.
    """
    require(data_list, "data_list must not be empty: give at least one value to put")
    import ray

    from phalanx.wire.codec import encode

    threads = min(len(data_list), _MOST_THREADS) if max_workers is None else max_workers
    with ThreadPoolExecutor(max_workers=threads) as pool:
        return list(pool.map(lambda value: ray.put(encode(value)), data_list))


def get_event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this thread, made where there is none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        pass
    try:
        loop = asyncio.get_event_loop_policy().get_event_loop()
    except RuntimeError:
        loop = None
    if loop is None or loop.is_closed():
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
    return loop


def auto_await(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func`` so that it can be called from anywhere: outside of an event loop a coroutine is run to its end."""

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = func(*args, **kwargs)
        if not inspect.iscoroutine(given):
            return given
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(given)
        return given

    return call
