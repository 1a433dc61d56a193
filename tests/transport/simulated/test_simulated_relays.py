"""Calls of large groups go through relays in the model too: their cost, their values, and what is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx.runtime.calls.relayed_door import RelayedDoor
from phalanx.runtime.session import connection
from phalanx.transport.simulated.costs import Cost, Costs
from phalanx.transport.simulated.model import Model
from phalanx.transport.simulated.transport import SimulatedTransport


class Worker(px.Worker):
    @px.register
    def nothing(self) -> None:
        """Nothing."""

    @px.register(px.Dispatch.ROWS)
    def double(self, rows: np.ndarray) -> np.ndarray:
        return rows * 2

    @px.register
    def who(self, odd: int | None = None) -> int:
        if self.rank == odd:
            raise KeyError("not this one")
        return self.rank

    @px.register
    def large(self) -> np.ndarray:
        return np.full(20_000, self.rank)


@contextmanager
def group(
    nodes: int, costs: dict[str, Cost] | None = None, fan_out: int = 2, relay_from: int = 2, **model: Any
) -> Iterator[tuple[Any, SimulatedTransport]]:
    """Two ranks on each node; its first call, which waits for the relays, is over."""
    transport = SimulatedTransport(Model(nodes, 2, **model), Costs(costs or {"*": Cost(0.0)}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_RELAY_FROM", str(relay_from))
        patch.setenv("PHALANX_RELAY_FAN_OUT", str(fan_out))
        with connection.standing_in(transport), px.ResourcePool([2] * nodes) as pool:
            made = px.WorkerGroup(pool, Worker)
            made.nothing()
            yield made, transport


def seconds(transport: SimulatedTransport, call: Any) -> float:
    begun = transport.now()
    call()
    return transport.now() - begun


def test_messages_are_those_of_the_tree() -> None:
    with group(4) as (made, transport):
        relays = transport.made_relays[0]
        before = relays.counted.messages
        made.nothing()
        assert (relays.tree.hops, relays.tree.heads) == (3, 2)
        assert relays.counted.messages - before == len(relays.tree.relays) + 8


def test_values_are_those_of_the_direct_way() -> None:
    with group(4, {}, run="each") as (made, _):
        assert isinstance(made.core.door, RelayedDoor)
        assert made.who() == list(range(8))
        assert made[1:7:2].who() == [1, 3, 5]
        assert made[5].who() == 5
        rows = np.arange(20.0)
        assert (made.double(made.double.submit(rows)) == 4 * rows).all()
        assert [int(output[0]) for output in made.large()] == list(range(8))
        with pytest.raises(KeyError, match="rank 3"):
            made.who(3)
        assert made.who() == list(range(8))


def test_the_driver_spends_little_on_each_rank_and_relays_work_side_by_side() -> None:
    with group(128, fan_out=32, relay_from=64) as (made, transport):
        relayed = seconds(transport, made.nothing)
    with group(128, relay_from=0) as (made, transport):
        constants = transport.model.constants
        direct = seconds(transport, made.nothing)
    assert direct > 256 * (constants.submit_s + constants.take_s)
    assert relayed < direct / 5


def test_a_call_takes_as_long_as_its_slowest_rank() -> None:
    with group(4, {"who": Cost(3.0), "nothing": Cost(0.0)}) as (made, transport):
        assert 3.0 < seconds(transport, made.who) < 3.1


def test_a_deadline_names_the_ranks_that_were_late() -> None:
    with (
        group(4, {"who": Cost(50.0), "nothing": Cost(0.0)}) as (made, _),
        pytest.raises(px.CallTimeout) as raised,
    ):
        made[2:4].who.options(timeout=5.0)()
    assert sorted(failure.rank for failure in raised.value.failures) == [2, 3]


def test_a_node_that_fails_ends_the_call_with_its_ranks_named() -> None:
    costs = {"who": Cost(3600.0), "nothing": Cost(0.0)}
    with group(4, costs, hours_between_failures=2.0, seed=4) as (made, transport):
        first = min(transport.slots.nodes, key=lambda node: node.fails_at)
        with pytest.raises(px.WorkerDiedError) as raised:
            for _ in range(100):
                made.who()
        gone = transport.slots.nodes.index(first)
        assert {2 * gone, 2 * gone + 1} <= {report.rank for report in raised.value.failures}
        made.restart()
        assert made.nothing() == [None] * 8


def test_a_call_that_is_cancelled_leaves_the_group_ready() -> None:
    with group(4, {"who": Cost(50.0), "nothing": Cost(0.0)}) as (made, _):
        future = made.who.submit(-1)
        assert future.cancel()
        with pytest.raises(px.CallCancelled):
            future.result()
        assert made.nothing() == [None] * 8


def test_relays_keep_nothing_of_calls_that_are_over() -> None:
    with group(4) as (made, transport):
        for _ in range(5):
            made.nothing()
        made.core.door.look()
        made.core.door.look()
        assert len(transport.made_relays[0]._kept) <= 2
