"""Drains a node of a cluster of its own under a group, and prints what the group said, for a test."""

from __future__ import annotations

import threading
import time
from typing import Any

import phalanx as px
from tests.support.own_cluster import drain, node_of, several_nodes
from tests.support.scripts import tell


class Counter(px.Worker):
    def __init__(self) -> None:
        self.total = 0

    @px.register
    def node(self) -> str:
        return self._context.node_id

    @px.register(rerun_on_restart=True)
    def load(self, total: int) -> None:
        self.total = total

    @px.register
    def nap(self) -> None:
        time.sleep(120)

    @px.register
    def step(self) -> int:
        self.total += 1
        return self.total


def main() -> None:
    with several_nodes(3, resources={"seat": 2}) as cluster:
        found: dict[str, Any] = {}
        told = threading.Event()
        seen: list[tuple[px.PreemptionNotice, str]] = []

        def note(notice: px.PreemptionNotice) -> None:
            seen.append((notice, threading.current_thread().name))
            told.set()

        pool = px.ResourcePool([2, 2], use_gpu=False, timeout=60)
        group = px.WorkerGroup(
            pool,
            Counter,
            resources={"seat": 1},
            start_timeout=60,
            on_notice=note,
            on_failure=px.RestartPolicy(max_restarts=0),
        )
        before = group.node()
        found["steps"] = [group.step()]
        found["early"] = len(px.preemption_notices(group))

        drain(cluster, before[2], 60)
        began = time.monotonic()
        found["told"] = told.wait(20.0)
        found["took"] = time.monotonic() - began
        notice, found["thread"] = seen[0]
        found["notice"] = [list(notice.ranks), notice.node == before[2], notice.host, notice.reason]
        found["deadline_in"] = None if notice.deadline is None else notice.deadline - time.time()
        found["asked"] = [list(one.ranks) for one in px.preemption_notices(group)] + [
            len(px.preemption_notices(group))
        ]
        found["steps"].append(group.step())  # the ranks work on meanwhile

        cluster.remove_node(node_of(cluster, before[2]), allow_graceful=False)
        try:
            group.nap()
            found["lost"] = None
        except px.PhalanxError as error:
            found["lost"] = type(error).__name__
        found["after"] = group.step()  # by px.RestartPolicy(max_restarts=0): it was announced
        after = group.node()
        found["moved"] = before[2] not in after and before[:2] == after[:2]
        tell(found)
        pool.close()


if __name__ == "__main__":
    main()
