"""Calls that a restart reruns, and the entries kept for them."""

from __future__ import annotations

from typing import Any

import pytest

import phalanx as px


class Loader(px.Worker):
    """A restart reruns its calls of ``load`` and ``warm_up``."""

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
def group(here: px.ResourcePool) -> Any:
    return px.WorkerGroup(here[:2], Loader)


def test_unread_calls_keep_at_most_two_entries_per_method_and_the_newest_is_rerun(group: Any) -> None:
    for number in range(50):
        group.load.submit(number)
        group.warm_up.submit(number)

    assert len(group.core.reruns.entries) <= 4
    group.restart()
    assert group.what_is_loaded() == [[49, 49]] * 2


def test_a_second_restart_reruns_a_call_whose_future_is_stale(group: Any) -> None:
    future = group.load.submit(7)
    group.restart()
    with pytest.raises(px.errors.StaleEpoch):
        future.result()

    group.restart()

    assert group.what_is_loaded() == [[7, 0]] * 2


@pytest.mark.parametrize("ends", [[0, 1], [1, 0]], ids=["in order", "the failed call first"])
def test_a_restart_reruns_the_call_before_a_failed_call(group: Any, ends: list[int]) -> None:
    futures = [group.load.submit(7), group.load.submit(-1)]
    for index in ends:
        futures[index].exception()

    group.restart()

    assert group.what_is_loaded() == [[7, 0]] * 2


def test_any_does_not_count_a_finished_call_that_a_restart_would_rerun(group: Any) -> None:
    group.any.load(1)

    assert not group.core.chosen
