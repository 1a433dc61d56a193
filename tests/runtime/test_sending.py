"""What sending a call leaves behind: nothing on some ranks only, no arguments, right counts of calls under way."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import phalanx as px


class Counter(px.Worker):
    def __init__(self) -> None:
        self.calls = 0

    @px.register(px.Dispatch.DP_COMPUTE)
    def deal(self, x: Any) -> int:
        self.calls += 1
        return self.calls

    @px.register
    def count(self) -> int:
        return self.calls

    @px.register
    def which(self, x: Any = None) -> int:
        return self.rank

    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def rows(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return x


@pytest.fixture(scope="module")
def pair(backend: str) -> Iterator[px.ResourcePool]:
    with px.ResourcePool([2], use_gpu=False, backend=backend) as pool:
        yield pool


@pytest.fixture
def group(pair: px.ResourcePool) -> Iterator[px.WorkerGroup]:
    with px.WorkerGroup(pair, Counter) as made:
        yield made


def test_no_rank_is_called_when_the_piece_of_another_cannot_be_sent(group: px.WorkerGroup) -> None:
    with pytest.raises(px.DispatchError, match="lock"):
        group.deal([1, threading.Lock()])
    assert group.count() == [0, 0]


def test_a_future_does_not_keep_the_arguments_of_its_call(group: px.WorkerGroup) -> None:
    sent = np.ones(10)
    still_there = weakref.ref(sent)
    future = group.which.submit(sent)
    del sent
    gc.collect()
    assert still_there() is None
    assert future.result() == [0, 1]


def test_calls_that_have_ended_count_for_no_rank(group: px.WorkerGroup) -> None:
    for view in (group, group[0], group.any):
        list(view.which.stream())
        view.which.submit()
    group.count()  # comes after them on each rank
    gc.collect()
    assert [group.any.which(), group.any.which()] == [0, 0]


def test_a_future_of_before_a_restart_is_no_argument(group: px.WorkerGroup) -> None:
    stale = group.rows.submit(np.ones(4))
    group.restart()
    for method in (group.rows, group.which):
        with pytest.raises(px.StaleEpoch):
            method(stale)


class Unreadable:
    """Travels, but does not arrive."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


def test_a_stored_value_that_cannot_be_read_says_so(backend: str) -> None:
    with pytest.raises(px.PhalanxError, match="not a number"):
        px.put(Unreadable(), backend=backend).get()
