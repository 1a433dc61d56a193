"""Syncs weights between two nodes of a cluster of its own, and prints what it saw."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch
from ray._private.internal_api import node_stats
from ray.cluster_utils import Cluster

import phalanx as px

STORE = 160 * 2**20
GPUS = 3  # of a node, logical: they say which groups fit onto one
ROWS, COLUMNS = 1024, 2048  # 8 MB


def full(version: int) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) + version


class Side(px.Worker):
    """Has a part of one matrix, and one bias whole. Armed, it kills itself a moment after a sync has begun."""

    def part(self, dim: int) -> None:
        whole = full(0)
        self.dim, mine = dim, whole.chunk(self.world_size, dim)
        sizes = tuple(mine[self.rank].shape)
        offsets = tuple(
            sum(one.shape[axis] for one in mine[: self.rank]) if axis == dim else 0 for axis in (0, 1)
        )
        self.tensors = {"weight": torch.zeros(sizes), "bias": torch.zeros(7)}
        self.boxes = {"weight": px.weights.ShardSpec((ROWS, COLUMNS), ((offsets, sizes),))}
        self.armed = False

    def model(self) -> dict[str, torch.Tensor]:
        if self.armed:
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return self.tensors

    @px.register
    def arm(self, rank: int) -> None:
        self.armed = self.rank == rank

    @px.register(needs_weights=False)
    def node(self) -> str:
        return self._context.node_id

    @px.register
    def shared_memory(self) -> int:
        return len([name for name in os.listdir("/dev/shm") if "phalanx" in name])


class Source(Side):
    def __init__(self) -> None:
        self.part(0)
        self.publish_weights("policy", self.model, boxes=self.boxes)

    @px.register
    def become(self, version: int) -> None:
        self.tensors["weight"].copy_(full(version).chunk(self.world_size, self.dim)[self.rank])
        self.tensors["bias"].fill_(version)


class Target(Side):
    def __init__(self) -> None:
        self.part(1)
        self.accept_weights("policy", self.model, boxes=self.boxes)

    @px.register
    def has(self, version: int) -> bool:
        wanted = full(version).chunk(self.world_size, self.dim)[self.rank]
        return torch.equal(self.tensors["weight"], wanted) and bool((self.tensors["bias"] == version).all())


@contextmanager
def two_groups(sources: list[int], targets: list[int]) -> Iterator[tuple[px.WorkerGroup, px.WorkerGroup]]:
    with (
        px.ResourcePool(sources, use_gpu=True, max_colocate_count=1) as first,
        px.ResourcePool(targets, use_gpu=True, max_colocate_count=1) as second,
        px.WorkerGroup(first, Source) as source,
        px.WorkerGroup(second, Target) as target,
    ):
        yield source, target


def used() -> int:
    """Bytes in the object stores of all nodes."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return sum(
        node_stats(
            node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False
        ).store_stats.object_store_bytes_used
        for node in alive
    )


def settled() -> int:
    """What is in the stores once nothing more leaves them: they free what nobody refers to a little later."""
    least, until = used(), time.monotonic() + 5
    while least > 2**20 and time.monotonic() < until:
        least = min(least, used())
    return least


def synced(sync: px.WeightSync, source: Any, target: Any, version: int) -> dict[str, Any]:
    source.become(version)
    made = sync()
    return {
        "right": all(target.has(version)),
        "movers": sorted({one.transport for one in made.moved}),
        "nbytes": made.nbytes,
        "sources": len({one.source for one in made.moved}),
    }


def nodes_of(source: Any, target: Any) -> list[int]:
    """How many nodes the sources are on, the targets, and both."""
    return [len(set(source.node())), len(set(target.node())), len({*source.node(), *target.node()})]


def far(source: Any, target: Any) -> dict[str, Any]:
    with px.WeightSync(source, target, "policy", transport="gloo", bucket_bytes=1 << 20) as sync:
        first = [synced(sync, source, target, version) for version in (1, 2)]
        before = settled()
        rest = [synced(sync, source, target, version) for version in range(3, 21)]
        grown = settled() - before
    return {
        "nodes": nodes_of(source, target),
        "syncs": [*first, *rest],
        "held": before,
        "grown": grown,
        "shm": sum(source.shared_memory()),
    }


def mixed(source: Any, target: Any) -> dict[str, Any]:
    with px.WeightSync(source, target, "policy", transport="gloo", bucket_bytes=1 << 18) as sync:
        return {
            "nodes": nodes_of(source, target),
            "syncs": [synced(sync, source, target, version) for version in (1, 2, 3)],
            "source killed": killed(sync, source, target, source, 4),
            "target killed": killed(sync, source, target, target, 7),
        }


def killed(sync: px.WeightSync, source: Any, target: Any, group: Any, version: int) -> dict[str, Any]:
    """Rank 1 of ``group`` is killed in the middle of a sync; then the group is restarted."""
    group.arm(1)
    source.become(version)
    began = time.monotonic()
    try:
        sync()
        error: Exception | None = None
    except px.PhalanxError as caught:
        error = caught
    took = time.monotonic() - began
    group.restart()
    other = target if group is source else source
    if other.state != "ready":  # its ranks were held in transfers to the dead one for longer than the grace
        other.restart()
    right = [synced(sync, source, target, version + more)["right"] for more in (1, 2)]
    return {"kind": type(error).__name__, "took": took, "right": right}


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": STORE})
    for _ in range(2):
        cluster.add_node(num_cpus=GPUS, num_gpus=GPUS, object_store_memory=STORE)
    cluster.wait_for_nodes()
    px.init(backend="ray", address=cluster.address, log_to_driver=False)
    for case, sources, targets in ((far, [3], [2]), (mixed, [2, 2], [1, 1])):
        with two_groups(sources, targets) as (source, target):
            print("FOUND " + json.dumps({case.__name__: case(source, target)}), flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
