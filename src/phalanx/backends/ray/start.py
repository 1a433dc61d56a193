"""Start actors: small groups at once, large groups in waves."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from phalanx.backends.backend_types import SpawnRequest
from phalanx.backends.ray import placement_groups as placement
from phalanx.backends.ray import private
from phalanx.backends.ray.worker_actor import actor_class

NAMESPACE = "phalanx"
WAVE = 256
"""Number of processes that are started at once."""


def started(
    request: SpawnRequest, handles: dict[int, Any], prepare: Callable[[], None] | None = None
) -> list[Any]:
    """Start the processes in waves, add them to ``handles``, and return their reports.

    A wave begins when the wave before it has started. So the queue of the cluster's controller is short, and no process
    waits in it for longer than it takes to start. ``prepare`` is called once the first wave has been requested.

    Raises:
        GetTimeoutError: not all processes reported in time.
        RayError: a process did not start.
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


_STARTS_WITHIN_S = 60.0


class ServiceActor:
    """Calls ``start`` with the address of the node, and stays alive for the threads that it started."""

    def __init__(self, start: Callable[[str], Any]) -> None:
        self._result = start(ray.util.get_node_ip_address())

    def result(self) -> Any:
        """Return the result of ``start``."""
        return self._result


def start_service(start: Callable[[str], Any]) -> tuple[Any, Any]:
    """Return the actor and the result of ``start``. Ray ends the actor with the process that calls this."""
    where = NodeAffinitySchedulingStrategy(private.runtime_context().get_node_id(), soft=False)
    actor = private.create_actor(ServiceActor, start, num_cpus=0, max_restarts=0, scheduling_strategy=where)
    return actor, private.call(actor, "result").future().result(_STARTS_WITHIN_S)


def stop_service(service: Any) -> None:
    """Kill the actor of a service. Idempotent, also after the cluster was left."""
    if private.is_connected():
        with contextlib.suppress(RayError, ValueError):
            private.kill(service)
