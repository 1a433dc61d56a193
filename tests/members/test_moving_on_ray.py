"""A group trains on its own cluster, while one node is drained and another is terminated."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest

import phalanx as px
from tests.members.killed_trainers import Replicated, losses
from tests.support.own_cluster import drain, several_nodes
from tests.support.scripts import tell, told_by

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEPS, DRAINED_AT, ENDED_AT = 6, 2, 4


def main() -> None:
    """Run the driver, in a process of its own."""
    logging.basicConfig(level=logging.WARNING)
    with several_nodes(4) as cluster:
        found: dict[str, Any] = {"errors": []}
        told = threading.Event()
        heard: list[tuple[px.PreemptionNotice, str]] = []

        def note(notice: px.PreemptionNotice) -> None:
            heard.append((notice, threading.current_thread().name))
            told.set()

        with px.ResourcePool([2, 2], use_gpu=False, timeout=60) as pool:
            policy = px.ReplacePolicy(max_failures=0)  # preemptions are no failures
            group = px.WorkerGroup(pool, Replicated, start_timeout=120, on_failure=policy, on_notice=note)
            px.snapshot(group)
            found["expected"] = [losses(group, number) for number in range(STEPS)]
            px.restore(group)
            pids, nodes = group.pid(), [group.core.epoch.nodes]
            seen: list[list[float]] = []
            while len(seen) < STEPS:
                if len(seen) == DRAINED_AT and "took" not in found:
                    found["early"] = len(px.preemption_notices(group))
                    drain(cluster, nodes[0][2], 120)
                    began = time.monotonic()
                    told.wait(20.0)
                    found["took"] = time.monotonic() - began
                    notice, found["thread"] = heard[0]
                    of_the_node = notice.node == nodes[0][2]
                    found["notice"] = [list(notice.ranks), of_the_node, notice.host, notice.reason]
                    found["deadline_in"] = None if notice.deadline is None else notice.deadline - time.time()
                    asked = px.preemption_notices(group), px.preemption_notices(group)
                    found["asked"] = [[list(one.ranks) for one in some] for some in asked]
                if len(seen) == ENDED_AT and "ended" not in found:
                    nodes.append(group.core.epoch.nodes)
                    found["moved_in"] = group.epoch
                    found["ended"] = nodes[1][2]
                    (node,) = [one for one in cluster.worker_nodes if one.node_id == found["ended"]]
                    cluster.remove_node(node, allow_graceful=True)  # SIGTERM to its raylet
                try:
                    seen.append(losses(group, len(seen)))
                    px.snapshot(group)
                except (px.CallError, px.GroupBroken) as error:
                    found["errors"].append(f"{type(error).__name__}: {error}"[:300])
                    if len(found["errors"]) > 4:
                        break
                    px.restore(group)
            nodes.append(group.core.epoch.nodes)
            found["losses"] = seen
            found["stayed"] = [one == other for one, other in zip(pids, group.pid(), strict=True)]
            found["nodes"] = nodes
            found["reasons"] = [notice.reason for notice in px.preemption_notices(group)]
            tell(found)


def test_ranks_move_off_drained_nodes_and_the_losses_do_not_change() -> None:
    (found,) = told_by(__name__, timeout=280)
    first, second, third = found["nodes"]

    # The group is notified within 2 s of a drain, on a thread of the library.
    assert found["took"] < 2.0
    assert found["thread"] == "phalanx-background"
    assert found["early"] == 0
    ranks, same_node, host, reason = found["notice"]
    assert (ranks, same_node) == ([2, 3], True)
    assert host
    assert reason
    assert 60 < found["deadline_in"] <= 120
    assert found["asked"] == [[[2, 3]], []]

    # Ranks move off a draining node before it ends.
    assert found["moved_in"] == 1
    assert first[:2] == second[:2]
    assert first[2] not in second

    # A node that is terminated counts as a preemption, not as a failure.
    assert found["ended"] not in third
    assert second[:2] == third[:2]
    assert len(found["errors"]) <= 1  # none if the loss was known before the next call
    assert any("was terminated" in reason for reason in found["reasons"])

    assert found["losses"] == found["expected"]
    assert found["stayed"] == [True, True, False, False]


if __name__ == "__main__":
    main()
