"""Groups of thousands of ranks, on a cluster that is a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest

import phalanx as px
from phalanx.runtime.session import connection
from phalanx.show.tables import Table
from phalanx.transport.simulated.costs import Cost, Costs
from phalanx.transport.simulated.model import Model
from phalanx.transport.simulated.transport import SimulatedTransport

NODES, RANKS = 128, 8
FAILS = Cost(1.0, spread=0.001, fail=1.0)


class Counted(px.Worker):
    @px.register(px.Dispatch.ROWS)
    def rows(self, values: np.ndarray) -> None:
        """Rows for each rank."""

    @px.register
    def nothing(self) -> None:
        """Nothing."""

    @px.register
    def fail(self) -> None:
        """Raises."""


@pytest.fixture
def cluster() -> Iterator[SimulatedTransport]:
    """Nodes of 8 ranks."""
    transport = SimulatedTransport(
        Model(NODES, RANKS), Costs({"nothing": Cost(1.0), "rows": Cost(0.0), "fail": FAILS})
    )
    with connection.standing_in(transport):
        yield transport


@pytest.fixture
def group(cluster: SimulatedTransport) -> Iterator[px.WorkerGroup]:
    with px.ResourcePool([RANKS] * NODES) as pool:
        yield px.WorkerGroup(pool, Counted)


def test_each_rank_knows_its_node_and_its_share_of_it(group: px.WorkerGroup) -> None:
    nodes = [endpoint.facts.slot.node_id for endpoint in group.core.endpoints]
    assert nodes == [f"node-{rank // RANKS}" for rank in range(NODES * RANKS)]


@pytest.fixture
def without_relays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_RELAY_FROM", "0")


def test_a_call_is_a_few_messages_of_the_driver(cluster: SimulatedTransport, group: px.WorkerGroup) -> None:
    before = cluster.messages
    assert group.nothing() == [None] * NODES * RANKS
    assert cluster.messages - before == 4


@pytest.mark.usefixtures("without_relays")
def test_ranks_work_side_by_side_while_the_driver_calls_one_after_another(
    cluster: SimulatedTransport, group: px.WorkerGroup
) -> None:
    begun = cluster.now()
    assert group.nothing() == [None] * NODES * RANKS
    driver = NODES * RANKS * (cluster.model.constants.submit_s + cluster.model.constants.take_s)
    assert 1.0 + driver <= cluster.now() - begun < 1.1 + driver


@pytest.mark.usefixtures("without_relays")
def test_every_rank_gets_its_rows(cluster: SimulatedTransport, group: px.WorkerGroup) -> None:
    before = cluster.messages
    group.rows(np.zeros((2 * group.world_size, 3)))
    assert cluster.messages - before == NODES * RANKS


def test_looks_at_ranks_that_all_fail_one_after_another_are_few(
    cluster: SimulatedTransport, group: px.WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    wait = cluster.wait

    def counted(refs: Sequence[Any], count: int, timeout: float | None) -> Any:
        looks.append(len(refs))
        return wait(refs, count, timeout)

    monkeypatch.setattr(cluster, "wait", counted)
    with pytest.raises(px.RemoteCallError) as raised:
        group.fail()

    assert len(raised.value.failures) == group.world_size
    assert sum(looks) < 100 * group.world_size


def test_a_large_group_is_explained_without_much_ado(group: px.WorkerGroup) -> None:
    with mock.patch.object(Table, "_rich", side_effect=AssertionError):
        text = str(group.explain())

    assert len(text.split("\n")) >= NODES * RANKS
