"""Small processes that serve this process, on its node, until it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from phalanx.backends.ray import private

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
