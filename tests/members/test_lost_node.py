"""A node is lost under a group that trains; the cluster is one of the test's own, in another process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Sequence
from typing import Any

import pytest

import phalanx as px
from phalanx.backends.backend_types import Endpoint, Ref, ResultHandle
from phalanx.testing import faults
from tests.members.killed_trainers import Replicated
from tests.support.fault_workers import is_there, within
from tests.support.own_cluster import several_nodes
from tests.support.scripts import tell, told_by

pytestmark = pytest.mark.timeout(300)
STEPS, LOST_AT = 4, 2


class Untold:
    """What is held back: the ends of calls of some ranks, which are ``refs``, and that their processes are gone."""

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
            return self._wait(refs, count, None)  # nobody else tells anything
        if not heard:
            return [], [*range(len(refs))]
        ended, _ = self._wait([refs[index] for index in heard], min(count, len(heard)), timeout)
        done = [heard[index] for index in ended]
        return done, [index for index in range(len(refs)) if index not in done]

    def dead_of(self, endpoints: Sequence[Endpoint]) -> list[int]:
        return [p for p in self._dead_of(endpoints) if endpoints[p] not in self._endpoints]


@contextlib.contextmanager
def untold(group: px.WorkerGroup, ranks: Sequence[int]) -> Generator[Untold]:
    """The time in which the driver is not told of the deaths of those ranks; their peers' errors come as ever."""
    transport: Any = group.core.backend
    held = Untold(transport, [group.core.endpoints[rank] for rank in ranks])
    with contextlib.ExitStack() as stack:
        for name in ("submit", "wait", "dead_of"):
            setattr(transport, name, getattr(held, name))
            stack.callback(delattr, transport, name)
        yield held


def losses(group: px.WorkerGroup, number: int) -> list[float]:
    return [loss for loss, _ in group.step(number)]


def main() -> None:
    """The driver, a process of its own; with the word "late" no death is told before the call has failed."""
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


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("late",), id="its peers tell of it before Ray does", marks=pytest.mark.slow),
        pytest.param((), id="as it comes", marks=pytest.mark.soak),
    ],
)
def test_its_ranks_are_replaced_elsewhere_and_the_losses_are_those_of_a_run_without_a_fault(
    words: tuple[str, ...],
) -> None:
    (found,) = told_by(__name__, *words, timeout=280)

    assert found["losses"] == found["expected"]
    assert found["holders"] == [2, 3, 0, 1]  # each on the other node
    assert found["stayed"] == [True, True, False, False]
    assert found["nodes"][2:] == [False, True]  # none on the lost one; the others are where they were
    assert found["epoch"] == 1
    assert found["error"]
    assert "node lost" in found["told"]  # whatever its peers said first


if __name__ == "__main__":
    main()
