"""A cluster of several nodes on this machine, for scripts that lose some of them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Generator
from typing import Any

import ray
from ray.cluster_utils import Cluster

import phalanx as px

_STORE = 80 * 2**20


@contextlib.contextmanager
def several_nodes(
    count: int, *, store: int = _STORE, settings: dict[str, Any] | None = None, **each: Any
) -> Generator[Cluster]:
    """Start equal nodes next to a head node that runs nothing, and connect ``px`` to them.

    ``settings`` are Ray's system configuration.
    """
    head = {"num_cpus": 0, "object_store_memory": store, "_system_config": settings}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(count):
        cluster.add_node(**{"num_cpus": 2, "object_store_memory": store, **each})
    cluster.wait_for_nodes()
    px.init(backend="ray", address=cluster.address, log_to_driver=False)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def drain(cluster: Cluster, node_id: str, seconds: int) -> None:
    """Drain a node, as a cloud's agent does before the cloud takes the node back."""
    subprocess.run(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "drain-node"),
            *("--address", cluster.address, "--node-id", node_id),
            *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the cloud wants it back"),
            *("--deadline-remaining-seconds", str(seconds)),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
