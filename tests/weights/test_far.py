"""Weights between two logical nodes of a cluster in another process."""

from __future__ import annotations

import pytest

import phalanx as px
from tests.support.own_cluster import several_nodes
from tests.support.scripts import tell, told_by
from tests.weights.weight_workers import NAME, Actor, Rollout, same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def main() -> None:
    """Sync from a rank on one of the nodes to ranks on both, since three logical GPUs limit the ranks of a node."""
    with (
        several_nodes(2, num_cpus=3, num_gpus=3),
        px.ResourcePool([2, 2], use_gpu=True, max_colocate_count=1) as theirs,
        px.ResourcePool([1], use_gpu=True, max_colocate_count=1) as ours,
        px.WorkerGroup(ours, Actor) as actor,
        px.WorkerGroup(theirs, Rollout, show_ranks="all") as rollout,
        px.WeightSync(actor, rollout, NAME, verify="full") as sync,
    ):
        for _ in range(3):
            actor.train()
            sync()
        are_equal = all(same(one, actor.values()[0]) for one in rollout.values())
        hops = sorted({row[2:4] for row in sync.explain().rows})
        for one in (sync, rollout, actor):
            one.close()
        tell({"equal": are_equal, "hops": hops, "agents": len(actor.core.backend._agents._remote)})


def test_a_sync_sends_weights_to_its_own_and_another_node_by_the_transport_of_each() -> None:
    (found,) = told_by(__name__, timeout=480)

    assert (found["equal"], found["agents"]) == (True, 0)
    assert found["hops"] == [["other node", "gloo"], ["same node", "shared memory"]]


if __name__ == "__main__":
    main()
