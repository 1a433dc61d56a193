"""``collect=`` through a group, and futures of such calls."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import phalanx as px


def longest(group: Any, outputs: list[list[int]]) -> list[int]:
    return [group.world_size, *max(outputs, key=len)]


def first_long(group: Any, outputs: list[list[int]]) -> list[int]:
    return next(output for output in outputs if len(output) > 100)


class Model(px.Worker):
    @px.register(px.Dispatch.ROWS, collect=first_long)
    def first_long(self, x: list[int]) -> list[int]:
        return x

    @px.register(px.Dispatch.ROWS)
    def rows(self, x: list[int]) -> list[int]:
        return [i * 10 for i in x]

    @px.register(px.Dispatch.ROWS, collect="first")
    def first(self, x: list[int]) -> list[int]:
        return [i * 10 for i in x]

    @px.register(px.Dispatch.ROWS, collect=longest)
    def longest(self, x: list[int]) -> list[int]:
        return x

    @px.register(collect="none")
    def lock(self) -> Any:
        self.held = threading.Lock()
        return self.held

    @px.register
    def told(self, x: Any) -> Any:
        return x


@pytest.fixture(scope="module")
def group(pool: px.ResourcePool) -> Any:
    return px.WorkerGroup(pool, Model)


def test_collect_first_returns_the_output_of_the_first_shard_and_a_function_gets_all_outputs(
    group: Any,
) -> None:
    assert group.first([1, 2, 3, 4, 5]) == [10, 20]
    assert group.longest([1, 2, 3, 4, 5]) == [4, 1, 2]
    assert group[0:2].longest([1, 2, 3]) == [2, 1, 2]


@pytest.mark.parametrize("pick", [lambda group: group, lambda group: group[1], lambda group: group.any])
def test_collect_none_accepts_outputs_that_cannot_be_pickled(group: Any, pick: Any) -> None:
    assert pick(group).lock() is None
    assert group.told(pick(group).lock.submit()) == [None] * 4


@pytest.mark.parametrize(("method", "value"), [("first", [10]), ("longest", [4, 1]), ("rows", [10, 20])])
def test_a_future_argument_has_the_collected_value(group: Any, method: str, value: Any) -> None:
    future = group.submit(method, [1, 2])

    assert group.told(future) == [value] * 4
    assert future.result() == value


def test_stop_iteration_in_a_collect_function_becomes_a_runtime_error(group: Any) -> None:
    async def awaited() -> Any:
        return await asyncio.wait_for(group.first_long.submit([1, 2, 3, 4]), 30)

    with pytest.raises(RuntimeError, match="collect function of first_long"):
        group.first_long([1, 2, 3, 4])
    with pytest.raises(RuntimeError, match="collect function of first_long"):
        asyncio.run(awaited())


@pytest.mark.slow_on_cluster
def test_arrived_outputs_can_be_streamed_after_a_restart(pool: px.ResourcePool) -> None:
    with px.WorkerGroup(pool, Model) as own:
        future = own.told.submit(1)
        outputs = future.stream()
        seen = [next(outputs)]
        while not future.done():
            pass
        own.restart()

        assert sorted([*seen, *outputs]) == [(rank, 1) for rank in range(4)]
