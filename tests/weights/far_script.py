"""Syncs weights between two nodes of its own cluster, and reports the results."""

from __future__ import annotations

import time
from typing import Any

import ray
import torch
from ray._private.internal_api import node_stats

import phalanx as px
from tests.support.own_cluster import several_nodes
from tests.support.scripts import tell

STORE = 160 * 2**20
GPUS = 3  # per node, logical: they limit the groups on a node
ROWS, COLUMNS = 1024, 2048  # 8 MB


def full(version: int) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) + version


class Side(px.Worker):
    """Has a shard of a matrix, split along ``dim``, and a complete bias."""

    dim = 0

    def __init__(self) -> None:
        part = self.part_of(0)
        sizes = tuple(part.shape)
        offsets = tuple(self.rank * size if axis == self.dim else 0 for axis, size in enumerate(sizes))
        self.tensors = {"weight": torch.zeros(sizes), "bias": torch.zeros(7)}
        self.boxes = {"weight": px.weights.ShardSpec((ROWS, COLUMNS), ((offsets, sizes),))}

    def part_of(self, version: int) -> torch.Tensor:
        return full(version).chunk(self.world_size, self.dim)[self.rank]

    @px.register(needs_weights=False)
    def node(self) -> str:
        return self._context.node_id


class Source(Side):
    def __init__(self) -> None:
        super().__init__()
        self.publish_weights("policy", self.tensors, boxes=self.boxes)

    @px.register
    def become(self, version: int) -> None:
        self.tensors["weight"].copy_(self.part_of(version))
        self.tensors["bias"].fill_(version)


class Target(Side):
    dim = 1

    def __init__(self) -> None:
        super().__init__()
        self.accept_weights("policy", self.tensors, boxes=self.boxes)

    @px.register
    def has(self, version: int) -> bool:
        bias = self.tensors["bias"]
        return torch.equal(self.tensors["weight"], self.part_of(version)) and bool((bias == version).all())


def used() -> int:
    """Return the bytes in the object stores of all nodes."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return sum(
        node_stats(
            node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False
        ).store_stats.object_store_bytes_used
        for node in alive
    )


def settled() -> int:
    """Return the bytes in the stores after a while, because they free unused objects with a delay."""
    least, until = used(), time.monotonic() + 5
    while least > 2**20 and time.monotonic() < until:
        least = min(least, used())
    return least


def synced(sync: px.WeightSync, source: Any, target: Any, version: int) -> dict[str, Any]:
    source.become(version)
    made = sync()
    rows = sync.explain().rows
    return {
        "right": all(target.has(version)),
        "movers": sorted({transport for _, _, _, transport, _ in rows}),
        "nbytes": made.nbytes,
        "sources": len({source for source, *_ in rows}),
    }


def seen(source: Any, target: Any) -> dict[str, Any]:
    with px.WeightSync(source, target, "policy", transport="gloo", bucket_bytes=1 << 18) as sync:
        first = [synced(sync, source, target, version) for version in (1, 2)]
        before = settled()
        rest = [synced(sync, source, target, version) for version in range(3, 21)]
        return {
            "nodes": [len(set(source.node())), len(set(target.node()))],
            "syncs": [*first, *rest],
            "held": before,
            "grown": settled() - before,
        }


def main() -> None:
    with (
        several_nodes(2, store=STORE, num_cpus=GPUS, num_gpus=GPUS),
        px.ResourcePool([2, 2], use_gpu=True, max_colocate_count=1) as ours,
        px.ResourcePool([1, 1], use_gpu=True, max_colocate_count=1) as theirs,
    ):
        tell(seen(px.WorkerGroup(ours, Source), px.WorkerGroup(theirs, Target)))


if __name__ == "__main__":
    main()
