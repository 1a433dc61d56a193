"""Use every private part of Ray that the library needs, on a cluster and after the cluster was left."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import Any

import ray

from phalanx.backends.ray import private


class Counter:
    def add(self, x: int) -> int:
        return x + 1

    @classmethod
    def whoami(cls) -> Any:
        return (private.current_call_id(), private.task_name())

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def items(self) -> Any:
        yield 0
        yield 1


class AsyncCounter:
    async def whoami(self) -> Any:
        await asyncio.sleep(0)
        return (private.current_call_id(), private.task_name())

    async def items(self) -> Any:
        yield (private.current_call_id(), private.task_name())


def check_calls(actor: Any) -> None:
    """Check that both sides of a call see the same id and name."""
    asynchronous = private.create_actor(AsyncCounter, num_cpus=0, max_restarts=0, max_concurrency=2)
    for handle in (actor, asynchronous):
        calls = [private.call(handle, "whoami", name=f"Counter.whoami@{number}") for number in range(3)]
        told = private.get(calls)
        assert told == [
            (private.call_id(ref), f"Counter.whoami@{number}") for number, ref in enumerate(calls)
        ]
        assert len(set(told)) == 3
    stream = private.call(asynchronous, "items", name="Counter.items@0", returns="streaming")
    first = private.get(next(stream))
    assert first == (private.call_id(stream.completed()), "Counter.items@0")


def check_connected() -> Any:
    """Use each function once, and return an actor's handle, a placement group and a reference."""
    connection = private.connection()
    assert private.is_connected()
    assert connection is private.connection()
    runtime_env = {"env_vars": {"GIVEN": "to the process"}}
    actor = private.create_actor(
        Counter, num_cpus=0, max_restarts=0, name="counter", namespace="phalanx", runtime_env=runtime_env
    )
    assert private.get(private.call(actor, "add", 1)) == 2
    assert private.get(private.call(actor, "variable", "GIVEN")) == "to the process"
    stream = private.call(actor, "items", name="Counter.items", returns="streaming", buffer=1)
    assert [private.get(item) for item in stream] == [0, 1]
    check_calls(actor)
    assert private.class_name(actor) == "Counter"
    assert private.actor_states()(private.actor_id(actor)) not in (None, private.DEAD)
    assert private.get_actor("counter", namespace="phalanx") == actor
    ref = private.put("value")
    assert private.wait([ref], num_returns=1, timeout=5)[0] == [ref]
    assert private.get(private.reference_to(private.address_of(ref))) == "value"
    group = private.placement_group([{"CPU": 1.0}], name="block")
    assert group.wait(10)
    assert private.placement_group_table(group)["state"] == "CREATED"
    node = private.runtime_context().get_node_id()
    assert [one["NodeID"] for one in private.nodes()] == [node]
    assert private.total_resources()[node]["CPU"] == 2.0
    assert private.free_resources()[node]["CPU"] <= 1.0
    assert private.draining_nodes() == {}
    assert not private.largest_cluster()
    private.write_key("key", b"value")
    assert private.read_key("key") == b"value"
    check_client(node)
    private.write_key("key", None)
    assert private.read_key("key") is None
    assert private.log_folder()
    assert private.runs_in_cluster_process()
    private.last_address()
    assert private.cluster_addresses()
    private.bootstrap_address()
    return actor, group, ref


def check_client(node: str) -> None:
    client = private.ClusterClient(private.runtime_context().gcs_address, 5.0)
    assert (client.keys_written(), client.read("key")) == (["key"], b"value")
    assert b"ray_version" in (client.metadata() or b"")
    assert [key.hex() for key in client.nodes()] == [node]
    assert list(client.jobs().values()) == [True]
    assert client.actor_names() == ["counter"]


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
        "nodes": private.nodes,
        "placement_group": lambda: private.placement_group([{"CPU": 1.0}]),
        "placement_group_table": private.placement_group_table,
        "remove_placement_group": lambda: private.remove_placement_group(group),
        "actor_states": lambda: private.actor_states()(private.actor_id(actor)),
        "total_resources": private.total_resources,
        "free_resources": private.free_resources,
        "write_key": lambda: private.write_key("key", b"value"),
        "read_key": lambda: private.read_key("key"),
    }
    for name, attempt in attempts.items():
        try:
            returned = attempt()
        except Exception:
            returned = None
        else:
            print(f"{name} returned {returned!r}", flush=True)
        if ray.is_initialized():
            print(f"{name} started a cluster", flush=True)
            ray.shutdown()


ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
kept = check_connected()
before = private.connection()
ray.shutdown()
assert not private.is_connected()
check_left(*kept)
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
assert private.connection() is not before
print("the end", flush=True)
sys.stdout.flush()
