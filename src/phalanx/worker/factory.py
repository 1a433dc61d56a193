"""Creates the runtime of a new worker process. Light: a driver names this function without importing the runtime."""

from __future__ import annotations

from typing import Any


def make_runtime(services: Any) -> Any:
    """Return the runtime of this worker process."""
    from phalanx.worker.worker_runtime import WorkerRuntime  # heavy

    return WorkerRuntime(services)
