"""A training group loses a node. Driver and cluster run in another process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Sequence
from typing import Any

import pytest

import phalanx as px
from phalanx.backends.backend_types import Endpoint, Ref, ResultHandle
from phalanx.testing import faults
from tests.members.killed_trainers import Replicated, losses
from tests.support.fault_workers import is_there, within
from tests.support.own_cluster import several_nodes
from tests.support.scripts import tell, told_by

pytestmark = pytest.mark.timeout(300)
STEPS, LOST_AT = 4, 2


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
    with contextlib.ExitStack() as stack:
        for name in ("submit", "wait", "dead_of"):
            setattr(transport, name, getattr(held, name))
            stack.callback(delattr, transport, name)
        yield held


def main() -> None:
    """Run the driver. With the argument "late", it learns of no death before the call has failed."""
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
        late = "late" in sys.argv
        held = contextlib.ExitStack()
        while len(seen) < STEPS:
            if len(seen) == LOST_AT and "lost" not in found:
                if late:
                    held.enter_context(untold(group, [2, 3]))
                found["lost"] = faults.drop_node(cluster, group, 3)
                if late:  # otherwise a step may end before the ranks die
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
def test_ranks_of_a_lost_node_are_replaced_on_another_node_with_the_same_losses(
    words: tuple[str, ...],
) -> None:
    (found,) = told_by(__name__, *words, timeout=280)

    assert found["losses"] == found["expected"]
    assert found["holders"] == [2, 3, 0, 1]  # each on the other node
    assert found["stayed"] == [True, True, False, False]
    assert found["nodes"][2:] == [False, True]  # no rank is on the lost node; the other ranks did not move
    assert found["epoch"] == 1
    assert found["error"]
    assert "node lost" in found["told"]  # whatever its peers reported first


if __name__ == "__main__":
    main()
