"""Which calls a restart makes again, and what is kept for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import phalanx as px


class Loader(px.Worker):
    """What it loads is loaded again after a restart."""

    def __init__(self) -> None:
        self.loaded = [0, 0]

    @px.register(rerun_on_restart=True)
    def load(self, number: int) -> None:
        self.loaded[0] = number
        if number < 0:
            raise ValueError("no such checkpoint")

    @px.register(rerun_on_restart=True)
    def warm_up(self, number: int) -> None:
        self.loaded[1] = number

    @px.register
    def what_is_loaded(self) -> list[int]:
        return self.loaded


@pytest.fixture
def group() -> Iterator[Any]:
    with px.ResourcePool([2], use_gpu=False, backend="inline") as pool:
        yield px.WorkerGroup(pool, Loader)


def test_of_calls_that_nobody_waits_for_one_of_each_method_is_kept_beside_the_newest(group: Any) -> None:
    for number in range(50):
        group.load.submit(number)
        group.warm_up.submit(number)

    assert len(group.core.reruns.entries) <= 4
    group.restart()
    assert group.what_is_loaded() == [[49, 49]] * 2


def test_a_call_that_a_restart_has_repeated_is_repeated_though_its_old_future_is_stale(group: Any) -> None:
    future = group.load.submit(7)
    group.restart()
    with pytest.raises(px.errors.StaleEpoch):
        future.result()

    group.restart()

    assert group.what_is_loaded() == [[7, 0]] * 2


@pytest.mark.parametrize("ends", [[0, 1], [1, 0]], ids=["in order", "the failed call first"])
def test_a_call_that_failed_leaves_the_one_before_it(group: Any, ends: list[int]) -> None:
    futures = [group.load.submit(7), group.load.submit(-1)]
    for index in ends:
        futures[index].exception()

    group.restart()

    assert group.what_is_loaded() == [[7, 0]] * 2


def test_a_call_of_any_rank_that_a_restart_makes_again_is_not_counted_once_it_has_ended(group: Any) -> None:
    group.any.load(1)

    assert not group.core.chosen
