"""Starting actors: all at once where they are few, else in waves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from phalanx.backends.backend_types import SpawnRequest
from phalanx.backends.ray import placement_groups as placement
from phalanx.backends.ray import private
from phalanx.backends.ray.worker_actor import actor_class

NAMESPACE = "phalanx"
WAVE = 256
"""Processes that are asked for at once."""


def started(
    request: SpawnRequest, handles: dict[int, Any], prepare: Callable[[], None] | None = None
) -> list[Any]:
    """Start the processes in waves, into ``handles``; return what each reported.

    A wave begins when the one before it is there: the controller of the cluster has a short queue then, and no process
    waits in it for longer than it takes to start. ``prepare`` is called as soon as the first wave was asked for.

    Raises:
        GetTimeoutError: they did not all report in time.
        RayError: one did not start.
    """
    create = _creating(request)
    deadline = time.monotonic() + request.timeout
    reports: list[Any] = []
    for first in range(0, len(request.slots), WAVE):
        wave = range(first, min(first + WAVE, len(request.slots)))
        for index in wave:
            handles[index] = create(index)
        if first == 0 and prepare is not None:
            prepare()
        asked = [private.call(handles[index], "_px_report") for index in wave]
        reports += private.get(asked, timeout=max(0.0, deadline - time.monotonic()))
    return reports


def _creating(request: SpawnRequest) -> Callable[[int], Any]:
    """Return the function that creates the process of a slot."""
    cls = actor_class(request.class_name, request.methods, request.max_concurrency is not None)
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
    custom: dict[str, float] = {}
    for resource, amount in request.resources.items():
        if resource == "CPU":
            options["num_cpus"] = amount
        elif resource == "GPU":
            options["num_gpus"] = amount
        else:
            custom[resource] = amount
    if custom:
        options["resources"] = custom
    if request.runtime_env:
        options["runtime_env"] = dict(request.runtime_env)
    if request.max_concurrency is not None:
        options["max_concurrency"] = request.max_concurrency
    if request.detached:
        options["lifetime"] = "detached"

    def create(index: int) -> Any:
        named = _named(request.names[index], request.namespace) if request.names else {}
        where = placement.strategy(request.slots[index], request.reservations)
        return private.create_actor(cls, request.factory, **options, **named, scheduling_strategy=where)

    return create


def _named(name: str, namespace: str | None) -> dict[str, str]:
    return {"name": name, "namespace": NAMESPACE if namespace is None else namespace}
