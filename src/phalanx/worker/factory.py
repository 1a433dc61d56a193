"""What a backend calls in a new worker process. Light: nothing heavy is imported before the process is a rank."""

from __future__ import annotations

from typing import Any


def make_host(services: Any) -> Any:
    """The host of this process."""
    from phalanx.worker.worker_runtime import WorkerRuntime  # heavy

    return WorkerRuntime(services)
