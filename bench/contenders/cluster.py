"""The Ray cluster of a contender, and Ray's own counts: bytes in the store, bytes that the driver read."""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import ray

LOGICAL_CPUS = 64
"""CPU slots for the largest scenario, equal for all contenders on every machine."""

STORE_BYTES = 3 << 30
"""Size of each contender's object store, for the largest scenario. All stores exist at once, and their pages stay."""


def start() -> dict[str, str]:
    """Start a local cluster, the same for every contender. Return versions."""
    import torch

    ray.init(
        address="local",
        num_cpus=LOGICAL_CPUS,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    return {"ray": ray.__version__, "torch": torch.__version__}


class StoreWatch:
    """The object store during some work, by the raylet's statistics (needs grpcio).

    `peak` is the most bytes in use at a sample (every 10 ms), `created` counts the bytes of all created objects.
    Both are None if grpcio is missing.
    """

    def __init__(self, interval: float = 0.01) -> None:
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._available = importlib.util.find_spec("grpc") is not None
        self._used_before = self._created_before = self._peak = 0
        self.peak: int | None = None
        self.created: int | None = None

    def __enter__(self) -> StoreWatch:
        if self._available:
            node = ray.nodes()[0]
            self._address = (node["NodeManagerAddress"], node["NodeManagerPort"])
            before = self._settled()
            self._used_before = before.object_store_bytes_used
            self._created_before = before.cumulative_created_bytes
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._available:
            return
        self._stop.set()
        self._thread.join()
        self.peak = max(0, self._peak - self._used_before)
        self.created = self._stats().cumulative_created_bytes - self._created_before

    def _settled(self) -> Any:
        """Return the statistics once they did not change for 0.2 s, after at most 5 s."""
        last, deadline = self._stats(), time.monotonic() + 5.0
        while time.monotonic() < deadline:
            time.sleep(0.2)
            now = self._stats()
            if now.object_store_bytes_used == last.object_store_bytes_used:
                break
            last = now
        return last

    def _stats(self) -> Any:
        from ray._private.internal_api import node_stats

        return node_stats(*self._address, include_memory_info=False).store_stats

    def _watch(self) -> None:
        while not self._stop.is_set():
            self._peak = max(self._peak, self._stats().object_store_bytes_used)
            time.sleep(self._interval)


class Fetched:
    """A counter of the bytes of all objects that this process read from Ray."""

    def __init__(self) -> None:
        self.total = 0


@contextmanager
def counting_fetches() -> Generator[Fetched]:
    """Count at the only function through which every `ray.get` and awaited reference of this process goes."""
    from ray._private.serialization import SerializationContext

    fetched = Fetched()
    original = SerializationContext.deserialize_objects

    def counted(self: Any, serialized_objects: Any, *args: Any, **kwargs: Any) -> Any:
        for data, *_ in serialized_objects:
            fetched.total += len(data) if data is not None else 0
        return original(self, serialized_objects, *args, **kwargs)

    setattr(SerializationContext, "deserialize_objects", counted)  # noqa: B010
    try:
        yield fetched
    finally:
        setattr(SerializationContext, "deserialize_objects", original)  # noqa: B010
