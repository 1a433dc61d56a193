"""Use private parts of Ray that the library needs, on a cluster and after the cluster was left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import ray

from phalanx.backends.ray import private

STATE = ("nodes", "placement_group_table", "total_resources", "free_resources")


class Counter:
    def add(self, x: int) -> int:
        return x + 1

    def items(self) -> Any:
        yield 0


def check_connected() -> Any:
    """Use the functions that tests of users would not miss; return an actor's handle, a placement group, a reference.

    The rest of the library suppresses errors of ``last_address``, ``autoscaling_state`` and ``metadata``.
    """
    actor = private.create_actor(Counter, num_cpus=0, max_restarts=0, name="counter", namespace="phalanx")
    assert private.get(private.call(actor, "add", 1)) == 2
    ref = private.put("value")
    assert private.get(private.reference_to(private.address_of(ref))) == "value"
    group = private.placement_group([{"CPU": 1.0}], name="block")
    assert group.wait(10)
    assert private.autoscaling_state().autoscaler_state_version == 0
    client = private.ClusterClient(private.runtime_context().gcs_address, 5.0)
    assert b"ray_version" in (client.metadata() or b"")
    assert private.runs_in_cluster_process()
    private.last_address()
    return actor, group, ref


def check_left(actor: Any, group: Any, ref: Any) -> None:
    """Call each function that needs a cluster: each raises, and starts no cluster."""
    attempts: dict[str, Callable[[], Any]] = {
        "call": lambda: private.call(actor, "add", 1),
        "stream": lambda: private.call(actor, "items", returns="streaming"),
        "create_actor": lambda: private.create_actor(Counter, num_cpus=0),
        "get": lambda: private.get(ref),
        "put": lambda: private.put(1),
        "wait": lambda: private.wait([ref], num_returns=1, timeout=0),
        "kill": lambda: private.kill(actor),
        "cancel": lambda: private.cancel(ref),
        "get_actor": lambda: private.get_actor("counter", namespace="phalanx"),
        "placement_group": lambda: private.placement_group([{"CPU": 1.0}]),
        "remove_placement_group": lambda: private.remove_placement_group(group),
        "actor_states": lambda: private.actor_states()(private.actor_id(actor)),
        **{name: getattr(private, name) for name in STATE},
        "write_key": lambda: private.write_key("key", b"value"),
        "read_key": lambda: private.read_key("key"),
    }
    for name, attempt in attempts.items():
        with contextlib.suppress(Exception):
            print(f"{name} returned {attempt()!r}", flush=True)
        if ray.is_initialized():
            print(f"{name} started a cluster", flush=True)
            ray.shutdown()


ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
kept = check_connected()
before = private.connection()
assert private.is_connected()
ray.shutdown()
assert not private.is_connected()
check_left(*kept)
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
assert private.connection() is not before
print("the end", flush=True)
