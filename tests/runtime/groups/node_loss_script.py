"""Loses nodes of a cluster of its own under a group, and prints what the group said, for a test."""

from __future__ import annotations

import json
import time
from typing import Any

import ray
from ray.cluster_utils import Cluster

import phalanx as px
from phalanx.testing import faults

KIND = {"num_cpus": 2, "resources": {"seat": 2}, "object_store_memory": 80 * 2**20}


class Sleeper(px.Worker):
    @px.register
    def node(self) -> str:
        return self._context.node_id

    @px.register
    def nap(self, seconds: float) -> None:
        time.sleep(seconds)

    @px.register(replay=True)
    def load(self, step: int) -> None:
        self.loaded = step

    @px.register
    def loaded_step(self) -> int:
        return self.loaded


def failed(call: Any) -> tuple[px.PhalanxError, float]:
    began = time.monotonic()
    try:
        call()
    except px.PhalanxError as error:
        return error, time.monotonic() - began
    raise AssertionError("it did not fail")


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 * 2**20})
    for _ in range(3):
        cluster.add_node(**KIND)
    cluster.wait_for_nodes()
    px.init(backend="ray", address=cluster.address, log_to_driver=False)
    found: dict[str, Any] = {}
    pool = px.ResourcePool([2, 2], use_gpu=False, timeout=60)
    group = px.WorkerGroup(pool, Sleeper, resources={"seat": 1}, start_timeout=60)
    group.load(7)
    before = group.node()

    call = group.nap.submit(120.0)
    lost = faults.drop_node(cluster, group, 3)
    error, found["took"] = failed(call.result)
    found["lost"] = lost
    found["kind"] = type(error).__name__
    found["text"] = str(error)
    found["causes"] = list(error.cause_ranks) if isinstance(error, px.CallError) else []
    found["hint"] = error.causes[0].hint if isinstance(error, px.CallError) else None

    group.restart()
    after = group.node()
    found["stayed"] = before[:2] == after[:2]
    found["moved"] = lost not in after and len(set(after)) == 2
    found["loaded"] = group.loaded_step()

    faults.drop_node(cluster, group, 2)
    failed(lambda: group.nap(60.0))
    error, _ = failed(group.restart)
    found["no_room"] = [type(error).__name__, str(error), group.state]
    print("FOUND " + json.dumps(found), flush=True)
    pool.close()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
