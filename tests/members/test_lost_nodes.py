"""Nodes are drained, terminated or die: ranks are replaced, or the group is restarted. The driver runs elsewhere."""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
import time
from collections.abc import Generator, Sequence
from typing import Any
from unittest import mock

import pytest

import phalanx as px
from phalanx.backends.backend_types import Endpoint, Ref, ResultHandle
from phalanx.testing import faults
from tests.members.killed_trainers import Replicated, losses
from tests.support.fault_workers import Trouble, is_there, within
from tests.support.own_cluster import drain, several_nodes
from tests.support.scripts import tell, told_by

pytestmark = pytest.mark.timeout(300)
STEPS, DRAINED_AT, ENDED_AT, LOST_AT = 7, 1, 3, 5


class Untold:
    """Hides the deaths of some ranks from the driver, and the ends of their calls, ``refs``."""

    def __init__(self, transport: Any, endpoints: Sequence[Endpoint]) -> None:
        self.refs: list[Ref] = []
        self._submit, self._wait, self._dead_of = transport.submit, transport.wait, transport.dead_of
        self._endpoints = endpoints

    def submit(self, endpoint: Endpoint, *args: Any) -> ResultHandle:
        result = self._submit(endpoint, *args)
        if endpoint in self._endpoints:
            self.refs.append(result.value)
        return result

    def wait(self, refs: Sequence[Ref], count: int, timeout: float | None) -> tuple[list[int], list[int]]:
        heard = [index for index, ref in enumerate(refs) if ref not in self.refs]
        if not heard and timeout is None:
            return self._wait(refs, count, None)  # all are hidden, and the wait has no limit
        if not heard:
            return [], [*range(len(refs))]
        ended, _ = self._wait([refs[index] for index in heard], min(count, len(heard)), timeout)
        done = [heard[index] for index in ended]
        return done, [index for index in range(len(refs)) if index not in done]

    def dead_of(self, endpoints: Sequence[Endpoint]) -> list[int]:
        return [p for p in self._dead_of(endpoints) if endpoints[p] not in self._endpoints]


@contextlib.contextmanager
def untold(group: px.WorkerGroup, ranks: Sequence[int]) -> Generator[Untold]:
    """Hide the deaths of some ranks from the driver, but not the errors of their peers."""
    transport: Any = group.core.backend
    held = Untold(transport, [group.core.endpoints[rank] for rank in ranks])
    with mock.patch.multiple(transport, submit=held.submit, wait=held.wait, dead_of=held.dead_of):
        yield held


def main() -> None:
    """Run the driver. With the argument "late", it learns of no death of the last node before the call has failed."""
    logging.basicConfig(level=logging.WARNING)
    often = {"health_check_period_ms": 500}  # Ray places ranks elsewhere after five failed checks
    with several_nodes(6, num_gpus=2, resources={"seat": 2}, settings=often) as cluster:
        found: dict[str, Any] = {"errors": []}
        heard = queue.SimpleQueue[tuple[px.PreemptionNotice, str]]()

        def note(notice: px.PreemptionNotice) -> None:
            heard.put((notice, threading.current_thread().name))

        pool = px.ResourcePool([2, 2], timeout=60)
        policy = px.ReplacePolicy(max_failures=1)  # of the lost node: preemptions are no failures
        group = px.WorkerGroup(pool, Replicated, start_timeout=120, on_failure=policy, on_notice=note)
        found["holders"] = px.snapshot(group).holders
        found["expected"] = [losses(group, number) for number in range(STEPS)]
        px.restore(group)
        pids, nodes = group.pid(), [group.core.epoch.nodes]
        seen: list[list[float]] = []
        held = contextlib.ExitStack()
        while len(seen) < STEPS and len(found["errors"]) < 5:
            if len(seen) == DRAINED_AT and "is_in_time" not in found:
                drain(cluster, nodes[0][2], 120)
                found["is_in_time"] = within(2.0, lambda: not heard.empty())
                notice, found["thread"] = heard.get(timeout=20.0)
                of_the_node = notice.node == nodes[0][2]
                found["notice"] = [list(notice.ranks), of_the_node, notice.host, notice.reason]
                found["deadline_in"] = None if notice.deadline is None else notice.deadline - time.time()
                asked = px.preemption_notices(group), px.preemption_notices(group)
                found["asked"] = [[list(one.ranks) for one in some] for some in asked]
            if len(seen) == ENDED_AT and "ended" not in found:
                nodes.append(group.core.epoch.nodes)
                found["moved_in"], found["ended"] = group.epoch, nodes[1][2]
                (node,) = [one for one in cluster.worker_nodes if one.node_id == found["ended"]]
                cluster.remove_node(node, allow_graceful=True)  # SIGTERM to its raylet
            if len(seen) == LOST_AT and "lost" not in found:
                nodes.append(group.core.epoch.nodes)
                found["preempted"] = len(found["errors"])
                before = group.pid()
                if "late" in sys.argv:
                    held.enter_context(untold(group, [2, 3]))
                found["lost"] = faults.drop_node(cluster, group, 3)
                if "late" in sys.argv:  # otherwise a step may end before the ranks die
                    assert within(60.0, lambda gone=before[2:]: not any(map(is_there, gone)))
            try:
                made = losses(group, len(seen))
                px.snapshot(group)
            except (px.CallError, px.GroupBroken) as error:
                held.close()
                found["errors"].append([error.lost, str(error).partition("\n")[0]])
                px.restore(group)
                continue
            seen.append(made)
        found["nodes"] = [*nodes, group.core.epoch.nodes]
        found["losses"], found["epoch"] = seen, group.epoch
        found["stayed"] = [one == other for one, other in zip(pids, group.pid(), strict=True)]
        found["reasons"] = [notice.reason for notice in px.preemption_notices(group)]
        pool.close()
        found["restart"] = restarted(cluster)
        tell(found)


def restarted(cluster: Any) -> dict[str, Any]:
    """Restart a group after each loss of a node, the second of which leaves too few nodes."""
    with px.ResourcePool([2, 2], timeout=60) as pool:
        with pytest.raises(px.PlacementError, match="can never be placed"):  # two seats per node of the slots
            px.WorkerGroup(pool.split([2, 2])[0], Trouble, resources={"seat": 2}, start_timeout=60)
        group = px.WorkerGroup(pool, Trouble, resources={"seat": 1}, start_timeout=60)
        group.load(7)
        before, call = group.core.epoch.nodes, group.nap.submit(120.0)
        lost, began = faults.drop_node(cluster, group, 3), time.monotonic()
        with pytest.raises(px.WorkerDiedError, match=lost[:8]) as raised:
            call.result()
        took = time.monotonic() - began
        group.restart()
        after, loaded = group.core.epoch.nodes, group.what_is_loaded()

        faults.drop_node(cluster, group, 2)
        with pytest.raises(px.PhalanxError):
            group.nap(60.0)
        with pytest.raises(px.PlacementError, match="slots ever/now"):
            group.restart()
        return {
            "took": took,
            "causes": raised.value.cause_ranks,
            "hint": raised.value.causes[0].hint,
            "stayed": before[:2] == after[:2],
            "moved": lost not in after and len(set(after)) == 2,
            "loaded": loaded,
            "state": group.state,
        }


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("late",), id="peers tell of the loss before Ray does", marks=pytest.mark.slow),
        pytest.param((), id="as it comes", marks=pytest.mark.soak),
    ],
)
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    (told,) = told_by(__name__, *request.param, timeout=280)
    return told


def test_a_lost_node_raises_one_error_and_a_restart_moves_its_ranks_or_lacks_capacity(
    found: dict[str, Any],
) -> None:
    seen = found["restart"]

    assert seen["took"] < 20.0
    assert seen["causes"] == [2, 3]
    assert "health_check_period_ms" in seen["hint"], "how the detection is tuned"
    assert (seen["stayed"], seen["moved"], seen["loaded"]) == (True, True, [7, 7, 7, 7])
    assert seen["state"] == "broken"


def test_ranks_of_drained_ended_and_lost_nodes_continue_on_other_nodes_with_the_same_losses(
    found: dict[str, Any],
) -> None:
    first, second, third, fourth = found["nodes"]

    # The group is notified within 2 s of a drain, on a thread of the library.
    assert found["is_in_time"]
    assert found["thread"] == "phalanx-background"
    ranks, same_node, host, reason = found["notice"]
    assert (ranks, same_node) == ([2, 3], True)
    assert host
    assert reason
    assert 60 < found["deadline_in"] <= 120
    assert found["asked"] == [[[2, 3]], []]

    # Ranks move off a draining node before it ends.
    assert found["moved_in"] == 1
    assert first[2] not in second

    # A node that is terminated counts as a preemption, not as a failure.
    assert found["ended"] not in third
    assert found["preempted"] <= 1  # none if the loss was known before the next call
    assert any("was terminated" in reason for reason in found["reasons"])

    # Ranks of a lost node are replaced, whatever their peers reported first.
    assert found["holders"] == [2, 3, 0, 1]  # each on the other node
    assert found["lost"] not in fourth
    is_lost, text = found["errors"][-1]
    assert is_lost
    assert "node lost" in text

    assert found["losses"] == found["expected"]
    assert (found["stayed"], found["epoch"]) == ([True, True, False, False], 3)
    assert first[:2] == second[:2] == third[:2] == fourth[:2]


if __name__ == "__main__":
    main()
