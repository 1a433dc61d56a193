"""The model of a cluster: events, cores, wires, costs, failures."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx.errors import DeclarationError
from phalanx.runtime.session import connection
from phalanx.transport.simulated.constants import Constants
from phalanx.transport.simulated.costs import Cost, Costs, parse, read
from phalanx.transport.simulated.events import Events
from phalanx.transport.simulated.machines import Node, Wires
from phalanx.transport.simulated.model import Model
from phalanx.transport.simulated.processes import Process, World
from phalanx.transport.simulated.transport import SimulatedTransport

FREE = Constants(
    0, 0, 0, 0, 0, 0, 0, 0, 0, math.inf, math.inf, math.inf, 0, 1e9, get_s=0, argument_s=0, idle_s=0
)


class Two(px.Worker):
    @px.register
    def long(self) -> str:
        return "real"

    @px.register
    def short(self, value: Any = None) -> None:
        """Less."""


@contextmanager
def group(
    costs: dict[str, Cost], *, constants: Constants = FREE, **model: Any
) -> Iterator[tuple[Any, Callable[[], float]]]:
    """A group of two nodes of two ranks, and the time."""
    transport = SimulatedTransport(Model(2, 2, constants=constants, **model), Costs(costs))
    with connection.standing_in(transport), px.ResourcePool([2, 2]) as pool:
        yield px.WorkerGroup(pool, Two), transport.now


def test_things_happen_in_the_order_of_their_time_and_of_one_time_as_they_were_noted() -> None:
    events, seen = Events(), list[str]()
    for time, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        events.at(time, lambda at, name=name: seen.append(name))
    events.until(1.5)
    assert (seen, events.now) == (["a", "b"], 1.5)
    events.until(3.0)
    assert seen == ["a", "b", "c"]


def test_a_value_for_many_nodes_spreads_from_those_that_have_it() -> None:
    wires, nodes = Wires(FREE), [Node(f"node-{i}", [0.0]) for i in range(16)]
    wires.store(1, nodes[0], 0.0)
    there = [wires.arrive(1, 10**9, node, 0.0) for node in nodes]
    assert max(there) == pytest.approx(4.0)  # 1, 2, 4, 8 and 16 nodes after so many seconds
    assert wires.moved_bytes == 15 * 10**9


def test_ranks_of_a_node_share_its_cores() -> None:
    with group({"short": Cost(0.0)}, constants=Constants(0, 0, 0, 0, 1.0, 0, 0, 0, 0, idle_s=0), cores=1) as (
        made,
        now,
    ):
        begun = now()
        made.short()
        assert now() - begun == pytest.approx(2.0, abs=0.01)  # two ranks of one second on one core


def test_what_processes_take_without_calls_is_not_there_for_calls() -> None:
    constants = replace(FREE, handle_s=1.0, idle_s=0.25)  # two on each node leave half a core
    with group({"short": Cost(0.0)}, constants=constants, cores=1) as (made, now):
        begun = now()
        made[0].short()
        assert now() - begun == pytest.approx(2.0)


def test_a_process_that_ended_takes_nothing() -> None:
    node = Node("node-0", [0.0])
    world = World(replace(FREE, idle_s=0.5), node)
    process = Process(world, node, 0.0)
    assert node.compute(0.0, 1.0) == 2.0
    process.end()
    process.end()
    assert node.compute(2.0, 1.0) == 3.0


def test_calls_of_one_rank_wait_for_each_other_and_those_of_others_do_not() -> None:
    with group({"long": Cost(5.0), "short": Cost(1.0)}) as (made, now):
        begun = now()
        first, second = made[0].long.submit(), made[1].short.submit()
        made[1].short.submit().result()
        assert now() - begun == 2.0
        assert second.done() and not first.done()
        made[0].short()
        assert now() - begun == 6.0


def test_a_result_that_is_handed_on_is_waited_for_by_the_rank_not_by_the_driver() -> None:
    with group({"long": Cost(5.0), "short": Cost(1.0)}) as (made, now):
        begun = now()
        made[1:2].short(made[0:1].long.submit())
        assert now() - begun == 6.0


def test_a_deadline_is_one_of_the_simulated_clock() -> None:
    with group({"long": Cost(5000.0)}) as (made, now), pytest.raises(px.CallTimeout):
        made.long.options(timeout=60.0)()


def test_tasks_of_an_event_loop_can_await_calls() -> None:
    async def both(made: Any) -> None:
        await asyncio.gather(made[0:1].long.submit(), made[1:2].short.submit())

    with group({"long": Cost(5.0), "short": Cost(1.0)}) as (made, now):
        begun = now()
        asyncio.run(both(made))
        assert now() - begun == 5.0


def test_what_is_stated_of_a_method_is_what_it_gives() -> None:
    with group({"long": Cost(0.0, returns={"loss": 1}, gives=True)}) as (made, _):
        assert made.long() == [{"loss": 1}] * 4


def test_one_worker_gives_what_stands_for_all() -> None:
    with group({}, run="one") as (made, _):
        assert made.long() == ["real"] * 4


def test_chance_is_decided_by_the_seed() -> None:
    def taken(seed: int) -> float:
        with group({"long": Cost(1.0, spread=0.1)}, seed=seed) as (made, now):
            made.long()
            return now()

    assert taken(1) == taken(1) != taken(2)


def test_a_method_that_may_raise_does() -> None:
    with (
        group({"long": Cost(1.0, fail=1.0)}) as (made, _),
        pytest.raises(px.RemoteCallError, match="ranks 0-3"),
    ):
        made.long()


def test_a_node_that_fails_takes_its_ranks_and_a_restart_gives_others() -> None:
    with group({"long": Cost(3600.0)}, hours_between_failures=20.0, seed=3) as (made, now):
        failures = 0
        for _ in range(100):
            try:
                made.long()
            except px.WorkerDiedError:
                failures += 1
                made.restart()
        assert 4 <= failures <= 20  # of two nodes in 100 hours: 10 are to be expected
        assert now() > 80 * 3600


def test_costs_are_read_from_words_and_from_tables(tmp_path: Path) -> None:
    words = parse("Trainer.update=2.0s,out=4KB,spread=5%,returns={'loss': 0.1}")
    path = tmp_path / "costs.toml"
    path.write_text('[Trainer.update]\nseconds = 2\nout = "4KB"\nspread = 0.05\nreturns = {loss = 0.1}\n')
    assert words == read(path) == {"Trainer.update": Cost(2.0, 0.05, 0.0, 4096, 0.0, {"loss": 0.1}, True)}


@pytest.mark.parametrize(
    "text", ["update", "update=", "update=1parsec", "update=1s,returns=loss", "update=-1"]
)
def test_costs_that_say_nothing_are_refused(text: str) -> None:
    with pytest.raises(DeclarationError):
        parse(text)


def test_large_values_take_the_time_of_their_bytes() -> None:
    constants = Constants(0, 0, 0, 0, 0, 0, 0, 0, 0, 1e9, math.inf, math.inf, 0, 1e8)
    with group({"short": Cost(0.0)}, constants=constants) as (made, now):
        begun = now()
        made.short(np.ones(10**8, dtype=np.uint8))
        # Into the store of the driver's node in 0.1 s, then to one node after the other: the first passes it on.
        assert now() - begun == pytest.approx(0.1 + 2.0, rel=0.02)
