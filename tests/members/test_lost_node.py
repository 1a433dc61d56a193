"""A training group loses a node. Driver and cluster run in another process."""

from __future__ import annotations

from typing import Any

import pytest

import phalanx as px
from phalanx.testing import faults
from tests.members.killed_trainers import Replicated, losses
from tests.support.own_cluster import several_nodes
from tests.support.scripts import tell, told_by

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEPS, LOST_AT = 4, 2


def main() -> None:
    """Run the driver, in another process."""
    # Ray reports a lost node after five health checks, and only then places its ranks elsewhere.
    with several_nodes(3, settings={"health_check_period_ms": 500}) as cluster:
        found: dict[str, Any] = {}
        pool = px.ResourcePool([2, 2], use_gpu=False, timeout=60)
        group = px.WorkerGroup(pool, Replicated, start_timeout=120, on_failure=px.ReplacePolicy())
        found["holders"] = px.snapshot(group).holders
        found["expected"] = [losses(group, number) for number in range(STEPS)]
        px.restore(group)
        before, nodes = group.pid(), group.core.epoch.nodes
        seen: list[list[float]] = []
        while len(seen) < STEPS:
            if len(seen) == LOST_AT and "lost" not in found:
                found["lost"] = faults.drop_node(cluster, group, 3)
            try:
                made = losses(group, len(seen))
                px.snapshot(group)
            except px.PhalanxError as error:
                found["error"], found["told"] = error.lost, str(error).partition("\n")[0]
                px.restore(group)
                continue
            seen.append(made)
        after = group.core.epoch.nodes
        found["losses"] = seen
        found["stayed"] = [one == other for one, other in zip(before, group.pid(), strict=True)]
        found["nodes"] = [len(set(nodes)), len(set(after)), found["lost"] in after, nodes[:2] == after[:2]]
        found["epoch"] = group.epoch
        tell(found)
        pool.close()


def test_ranks_of_a_lost_node_are_replaced_on_another_node_with_the_same_losses() -> None:
    (found,) = told_by(__name__, timeout=280)

    assert found["losses"] == found["expected"]
    assert found["holders"] == [2, 3, 0, 1]  # each on the other node
    assert found["stayed"] == [True, True, False, False]
    assert found["nodes"][2:] == [False, True]  # no rank is on the lost node; the other ranks did not move
    assert found["epoch"] == 1
    assert found["error"]
    assert "node lost" in found["told"]  # whatever its peers reported first


if __name__ == "__main__":
    main()
