"""Sent calls: no partial delivery, no kept arguments, and correct counts of calls in flight."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import phalanx as px

SLOW_ON_RAY = True


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


class AsksOnThreads(px.Worker):
    """Reads its rank on a thread of the constructor, before any other use of the rank."""

    def __init__(self) -> None:
        with ThreadPoolExecutor(1) as threads:
            self.seen = threads.submit(lambda: self.rank).result()

    @px.register
    def places(self) -> tuple[int, int]:
        return self.seen, self.rank

    @px.register
    async def cancel_itself(self) -> None:
        raise asyncio.CancelledError("given up")


@pytest.fixture(scope="module")
def group(pool: px.ResourcePool) -> px.WorkerGroup:
    return px.WorkerGroup(pool[0:2], Counter)


def test_no_rank_is_called_if_an_argument_of_another_rank_cannot_be_pickled(group: px.WorkerGroup) -> None:
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


def test_any_does_not_count_calls_that_have_ended(group: px.WorkerGroup) -> None:
    for view in (group, group[0], group.any):
        list(view.which.stream())
        view.which.submit()
    group.count()  # comes after them on each rank
    gc.collect()
    assert [group.any.which(), group.any.which()] == [0, 0]


@pytest.mark.slow_on_cluster
def test_a_future_from_before_a_restart_is_refused_as_an_argument(group: px.WorkerGroup) -> None:
    stale = group.rows.submit(np.ones(4))
    group.restart()
    for method in (group.rows, group.which):
        with pytest.raises(px.errors.StaleEpoch):
            method(stale)


@pytest.mark.slow_on_cluster
def test_a_constructor_thread_knows_the_rank_and_a_cancelled_task_is_an_error_of_the_worker(
    pool: px.ResourcePool,
) -> None:
    with px.WorkerGroup(pool[0:2], AsksOnThreads) as group:
        assert group.places() == [(0, 0), (1, 1)]
        with pytest.raises(px.RemoteCallError, match="given up") as caught:
            group.cancel_itself()
        assert caught.value.ranks == (0, 1)
        assert group.state == "ready"


def test_a_call_that_only_some_ranks_received_breaks_a_group_on_ray(
    pool: px.ResourcePool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with px.WorkerGroup(pool, Counter) as group:
        sender: Any = group.core.backend
        submit, sent = sender.submit, []

        def stops_at_the_second(*args: Any) -> Any:
            if sent:
                raise KeyboardInterrupt
            sent.append(args)
            return submit(*args)

        monkeypatch.setattr(sender, "submit", stops_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            group.which(1)
        monkeypatch.undo()
        # Inline, the ranks run one after another and never wait for each other.
        assert group.state == {"inline": "ready", "ray": "broken"}[backend]
        if backend == "ray":
            with pytest.raises(px.GroupBroken, match=r"rank 0 got the call, ranks \S*3 did not"):
                group.which(1)
