"""Loses a node under a group that trains, on a cluster of its own, and prints what came of it, for a test.

With the word "late" nothing is told of its ranks' deaths before the call has failed.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import phalanx as px
from phalanx.testing import faults
from tests.members.killed_trainers import Replicated
from tests.support.fault_workers import is_there, within
from tests.support.late_deaths import untold
from tests.support.own_cluster import several_nodes
from tests.support.scripts import tell

STEPS, LOST_AT = 4, 2


def losses(group: px.WorkerGroup, number: int) -> list[float]:
    return [loss for loss, _ in group.step(number)]


def main() -> None:
    # Ray itself gives the lost node up after five of its checks, and only then has room for others.
    with several_nodes(3, settings={"health_check_period_ms": 500}) as cluster:
        found: dict[str, Any] = {}
        pool = px.ResourcePool([2, 2], use_gpu=False, timeout=60)
        group = px.WorkerGroup(pool, Replicated, start_timeout=120, on_failure=px.ReplacePolicy())
        found["holders"] = px.snapshot(group).holders
        found["expected"] = [losses(group, number) for number in range(STEPS)]
        px.restore(group)
        before, nodes = group.pid(), group.core.epoch.nodes
        seen: list[list[float]] = []
        late = "late" in sys.argv
        held = contextlib.ExitStack()
        while len(seen) < STEPS:
            if len(seen) == LOST_AT and "lost" not in found:
                if late:
                    held.enter_context(untold(group, [2, 3]))
                found["lost"] = faults.drop_node(cluster, group, 3)
                if late:  # else a step may end before the ranks do
                    assert within(60.0, lambda: not any(map(is_there, before[2:])))
            try:
                made = losses(group, len(seen))
                px.snapshot(group)
            except px.PhalanxError as error:
                held.close()
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


if __name__ == "__main__":
    main()
