"""Hands rows from a group on one node to a group on another of a cluster of its own, and prints what went over."""

from __future__ import annotations

from typing import Any

import torch

import phalanx as px
from phalanx.wire.unpack import received
from tests.support.own_cluster import several_nodes
from tests.support.scripts import tell

GPUS = 3  # of a node, logical: the two groups of each case do not fit onto one


class Mover(px.Worker):
    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def make(self, wanted: torch.Tensor) -> torch.Tensor:
        return wanted.to(torch.float32)[:, None].repeat(1, 1024)

    @px.register(px.Dispatch.DP_COMPUTE_METRIC)
    def first_column(self, rows: torch.Tensor) -> list[float]:
        return rows[:, 0].tolist()

    @px.register
    def received(self) -> tuple[int, str]:
        return received.nbytes, self._context.node_id


def resharded(rows: int, sources: int, targets: int) -> dict[str, Any]:
    with (
        px.ResourcePool([sources], use_gpu=True) as first,
        px.ResourcePool([targets], use_gpu=True) as second,
        px.WorkerGroup(first, Mover) as a,
        px.WorkerGroup(second, Mover) as b,
    ):
        made = a.make.submit(torch.arange(rows))
        made.result()
        before = b.received()
        columns = b.first_column(made)
        after = b.received()
        nodes = {node for _, node in (*a.received(), *after)}
    return {
        "rows": rows,
        "sources": sources,
        "targets": targets,
        "nodes": len(nodes),
        "column": [value for column in columns for value in column],
        "fetched": [now - then for (now, _), (then, _) in zip(after, before, strict=True)],
    }


def main() -> None:
    with several_nodes(2, num_cpus=GPUS, num_gpus=GPUS):
        shapes = [(3, 2), (2, 3)]
        found = [resharded(257, sources, targets) for sources, targets in shapes]
        tell(found)


if __name__ == "__main__":
    main()
