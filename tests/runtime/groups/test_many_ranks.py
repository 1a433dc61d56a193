"""Groups of thousands of ranks, on a cluster that is a model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import phalanx as px
from phalanx.runtime.session import connection
from phalanx.transport.simulated.costs import Cost, Costs
from phalanx.transport.simulated.model import Model
from phalanx.transport.simulated.transport import SimulatedTransport

NODES, RANKS = 128, 8


class Counted(px.Worker):
    @px.register(px.Dispatch.ROWS)
    def rows(self, values: np.ndarray) -> None:
        """Rows for each rank."""

    @px.register
    def nothing(self) -> None:
        """Nothing."""


@pytest.fixture
def cluster() -> Iterator[SimulatedTransport]:
    """Nodes of 8 ranks."""
    transport = SimulatedTransport(Model(NODES, RANKS), Costs({"nothing": Cost(1.0), "rows": Cost(0.0)}))
    with connection.standing_in(transport):
        yield transport


@pytest.fixture
def group(cluster: SimulatedTransport) -> Iterator[px.WorkerGroup]:
    with px.ResourcePool([RANKS] * NODES) as pool:
        yield px.WorkerGroup(pool, Counted)


def test_each_rank_knows_its_node_and_its_share_of_it(group: px.WorkerGroup) -> None:
    nodes = [endpoint.facts.slot.node_id for endpoint in group.core.endpoints]
    assert nodes == [f"node-{rank // RANKS}" for rank in range(NODES * RANKS)]


def test_ranks_work_side_by_side_while_the_driver_calls_one_after_another(
    cluster: SimulatedTransport, group: px.WorkerGroup
) -> None:
    begun = cluster.now()
    assert group.nothing() == [None] * NODES * RANKS
    driver = NODES * RANKS * (cluster.model.constants.submit_s + cluster.model.constants.take_s)
    assert 1.0 + driver <= cluster.now() - begun < 1.1 + driver


def test_every_rank_gets_its_rows(cluster: SimulatedTransport, group: px.WorkerGroup) -> None:
    before = cluster.messages
    group.rows(np.zeros((2 * group.world_size, 3)))
    assert cluster.messages - before == NODES * RANKS
