"""Drains a node of a cluster of its own under a group, and prints what the group said, for a test."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import Any

import ray
from ray.cluster_utils import Cluster

import phalanx as px

KIND = {"num_cpus": 2, "resources": {"seat": 2}, "object_store_memory": 80 * 2**20}


class Counter(px.Worker):
    def __init__(self) -> None:
        self.total = 0

    @px.register
    def node(self) -> str:
        return self._context.node_id

    @px.register(replay=True)
    def load(self, total: int) -> None:
        self.total = total

    @px.register
    def nap(self) -> None:
        time.sleep(120)

    @px.register
    def step(self) -> int:
        self.total += 1
        return self.total


def drain(cluster: Cluster, node: str) -> None:
    """As a cloud's agent does it."""
    subprocess.run(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "drain-node"),
            *("--address", cluster.address, "--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION"),
            *("--reason-message", "the cloud wants it back", "--deadline-remaining-seconds", "60"),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 * 2**20})
    for _ in range(3):
        cluster.add_node(**KIND)
    cluster.wait_for_nodes()
    px.init(backend="ray", address=cluster.address, log_to_driver=False)
    found: dict[str, Any] = {}
    told = threading.Event()
    seen: list[tuple[px.Notice, str]] = []

    def note(notice: px.Notice) -> None:
        seen.append((notice, threading.current_thread().name))
        told.set()

    pool = px.ResourcePool([2, 2], use_gpu=False, timeout=60)
    group = px.WorkerGroup(
        pool,
        Counter,
        resources={"seat": 1},
        start_timeout=60,
        on_notice=note,
        on_failure=px.Restart(max_restarts=0),
    )
    before = group.node()
    found["steps"] = [group.step()]
    found["early"] = len(px.notices(group))

    drain(cluster, before[2])
    began = time.monotonic()
    found["told"] = told.wait(20.0)
    found["took"] = time.monotonic() - began
    notice, found["thread"] = seen[0]
    found["notice"] = [list(notice.ranks), notice.node == before[2], notice.host, notice.reason]
    found["deadline_in"] = None if notice.deadline is None else notice.deadline - time.time()
    found["asked"] = [list(one.ranks) for one in px.notices(group)] + [len(px.notices(group))]
    found["steps"].append(group.step())  # the ranks work on meanwhile

    gone = next(node for node in cluster.worker_nodes if node.node_id == before[2])
    cluster.remove_node(gone, allow_graceful=False)
    try:
        group.nap()
        found["lost"] = None
    except px.PhalanxError as error:
        found["lost"] = type(error).__name__
    found["after"] = group.step()  # by px.Restart(max_restarts=0): it was announced
    after = group.node()
    found["moved"] = before[2] not in after and before[:2] == after[:2]
    print("FOUND " + json.dumps(found), flush=True)
    pool.close()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
