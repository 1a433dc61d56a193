"""Starting actors: all at once where they are few, else a part of them after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from ray import exceptions as rayx

from phalanx.backends import waves
from phalanx.backends.backend_types import SpawnRequest
from phalanx.backends.ray import placement_groups as placement
from phalanx.backends.ray import private
from phalanx.backends.ray.worker_actor import actor_class

NAMESPACE = "phalanx"


def started(
    request: SpawnRequest, handles: dict[int, Any], prepare: Callable[[], None] | None = None
) -> list[Any]:
    """Ask for the processes, no more than so many at once, into ``handles``; what each reported.

    ``prepare`` is called as soon as the first ones were asked for.

    Raises:
        GetTimeoutError: they did not all report in time.
        RayError: one did not start.
    """
    create = _creating(request)
    deadline = time.monotonic() + request.timeout
    count = len(request.slots)
    order = range(count) if count <= waves.AT_ONCE else waves.order_of_start(_places(request))
    reports: dict[int, Any] = {}
    pending: list[Any] = []
    at = 0
    while at < count:
        wanted = waves.refill(len(pending), count - at, waves.AT_ONCE)
        begun = [order[at + index] for index in range(wanted)]
        for index in begun:
            handles[index] = create(index)
        if at == 0 and prepare is not None:
            prepare()
        for index in begun:
            reports[index] = private.call(handles[index], "_px_report")
            pending.append(reports[index])
        at += wanted
        if at < count:
            pending = _after_some(pending, deadline)
    left = max(0.0, deadline - time.monotonic())
    return private.get([reports[index] for index in range(count)], timeout=left)


def _after_some(pending: list[Any], deadline: float) -> list[Any]:
    """Wait for a part of the processes that are on their way; the others."""
    left = max(0.0, deadline - time.monotonic())
    there, others = private.wait(pending, num_returns=-(-len(pending) // 4), timeout=left, fetch_local=False)
    private.get(there, timeout=left)  # raises at once where one did not start
    if not there:
        raise rayx.GetTimeoutError
    return others


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


def _places(request: SpawnRequest) -> Sequence[Hashable]:
    """The block of each slot, which lies on one node."""
    return [(slot.pool, slot.block) for slot in request.slots]


def _named(name: str, namespace: str | None) -> dict[str, str]:
    return {"name": name, "namespace": NAMESPACE if namespace is None else namespace}
