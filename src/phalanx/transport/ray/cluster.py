"""Starting, joining and leaving a Ray cluster."""

from __future__ import annotations

import logging
from typing import Any

import ray


def is_running() -> bool:
    """Whether this process is connected to a cluster."""
    return bool(ray.is_initialized())


def start(options: dict[str, Any]) -> None:
    """Connect to the cluster that ``options`` or the environment name; start a local one if there is none."""
    defaults: dict[str, Any] = {
        "include_dashboard": False,
        "log_to_driver": True,
        "logging_level": logging.WARNING,
    }
    ray.init(**{**defaults, **options})


def stop() -> None:
    """Leave the cluster; a local one that this process started ends."""
    ray.shutdown()


def address() -> str:
    """Where the cluster is found, host:port."""
    return ray.get_runtime_context().gcs_address


def job_id() -> str:
    """Id of this driver's job."""
    return ray.get_runtime_context().get_job_id()


def in_worker() -> bool:
    """Whether this process is a Ray worker (a task or an actor of somebody), not a driver script."""
    if not ray.is_initialized():
        return False
    return ray.get_runtime_context().worker.mode == ray.WORKER_MODE
