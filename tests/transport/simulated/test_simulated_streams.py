"""Methods that yield, on a cluster that is a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import phalanx as px
from phalanx.runtime.session import connection
from phalanx.transport.simulated.costs import Cost, Costs
from phalanx.transport.simulated.model import Model
from phalanx.transport.simulated.transport import SimulatedTransport


class Yields(px.Worker):
    @px.register
    def pairs(self) -> Iterator[int]:
        yield from (self.rank, self.rank)


@contextmanager
def group(cost: Cost | None, **model: Any) -> Iterator[tuple[Any, Callable[[], float]]]:
    """A group of two nodes of two ranks, and the time."""
    transport = SimulatedTransport(Model(2, 2, **model), Costs({"pairs": cost} if cost else {}))
    with connection.standing_in(transport), px.ResourcePool([2, 2]) as pool:
        yield px.WorkerGroup(pool, Yields), transport.now


def test_items_are_there_once_the_stated_time_is_over() -> None:
    with group(Cost(60.0, returns=["a", "b"], gives=True)) as (made, now):
        begun = now()
        items = list(made.pairs.stream())
        assert now() - begun == pytest.approx(60.0, rel=0.01)  # of all ranks beside each other
    assert sorted(items) == [(rank, one) for rank in range(4) for one in "ab"]


def test_a_call_for_all_items_takes_the_stated_time_too() -> None:
    with group(Cost(60.0, returns=["a"], gives=True)) as (made, now):
        begun = now()
        assert made.pairs.submit().result() == [["a"]] * 4
        assert now() - begun == pytest.approx(60.0, rel=0.01)


def test_a_method_of_which_nothing_is_stated_is_named_and_yields_nothing() -> None:
    with group(None) as (made, _):
        assert list(made.pairs.stream()) == []
        assert made.core.transport.costs.unknown == {"Yields.pairs"}


def test_one_worker_yields_what_stands_for_all() -> None:
    with group(Cost(1.0), run="one") as (made, _):
        assert [item for _, item in made.pairs.stream()] == [0] * 8


def test_a_rank_that_fails_by_chance_ends_the_stream() -> None:
    with group(Cost(1.0, fail=1.0)) as (made, _), pytest.raises(px.RemoteCallError, match="by chance"):
        list(made.pairs.stream())


def test_a_stream_that_is_left_leaves_the_group_ready() -> None:
    with group(Cost(1.0, returns=[1, 2], gives=True)) as (made, _):
        with made.pairs.stream() as items:
            next(items)
        assert made.pairs.submit().result() == [[1, 2]] * 4
