"""Drains a node under a group that trains, and ends one by a signal, on a cluster of its own; prints what came."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import phalanx as px
from tests.members.killed_trainers import Replicated
from tests.support.own_cluster import drain, node_of, several_nodes
from tests.support.scripts import tell

STEPS, DRAINED_AT, ENDED_AT = 6, 2, 4


def losses(group: px.WorkerGroup, number: int) -> list[float]:
    return [loss for loss, _ in group.step(number)]


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    with several_nodes(4) as cluster:
        found: dict[str, Any] = {"errors": []}
        told = threading.Event()
        heard: list[tuple[px.PreemptionNotice, str]] = []

        def note(notice: px.PreemptionNotice) -> None:
            heard.append((notice, threading.current_thread().name))
            told.set()

        with px.ResourcePool([2, 2], use_gpu=False, timeout=60) as pool:
            policy = px.ReplacePolicy(max_failures=0)  # nothing of it is a failure
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
                    cluster.remove_node(
                        node_of(cluster, found["ended"]), allow_graceful=True
                    )  # SIGTERM to its raylet
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


if __name__ == "__main__":
    main()
