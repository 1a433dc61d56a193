"""Streams that are cut short: deadlines, cancelling, closing, death, restart, Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import operator
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import phalanx as px
from phalanx.calls.call_state import PendingStream
from phalanx.testing import faults
from tests.support.fault_workers import within

SLOW_ON_RAY = True

pytestmark = pytest.mark.timeout(120)
ENDLESS = 10**9


class Source(px.Worker):
    def __init__(self) -> None:
        self.ended = 0

    @px.register
    def count(self, n: int = ENDLESS) -> Iterator[int]:
        try:
            yield from range(n)
        finally:
            self.ended += 1

    @px.register
    async def count_async(self, n: int = ENDLESS) -> AsyncIterator[int]:
        try:
            for index in range(n):
                await asyncio.sleep(0)
                yield index
        finally:
            self.ended += 1

    @px.register
    def hang(self) -> Iterator[int]:
        try:
            yield 1
            threading.Event().wait()
        finally:
            self.ended += 1

    @px.register
    def times_left(self) -> int:
        return self.ended

    @px.register
    def read(self, source: Any, n: int) -> list[Any]:
        return sorted(source.count.stream(n))

    @px.register
    def read_some(self, source: Any) -> Any:
        with source.count.stream() as items:
            return next(items)


@pytest.fixture(scope="module")
def shared(pool: px.ResourcePool) -> px.WorkerGroup:
    return px.WorkerGroup(pool[0:2], Source)


def test_a_stream_that_misses_its_deadline_is_stopped_and_breaks_the_group(group: px.WorkerGroup) -> None:
    future = group.count_async.submit(1)
    assert future.result() == [[0], [0]]
    assert not future.cancel()  # it is over
    assert len(list(group.count.options(timeout=60.0).stream(20))) == 40
    assert group.state == "ready"

    with pytest.raises(px.CallTimeout, match="count"):
        for _ in group.count.options(timeout=0.3).stream():
            pass

    assert group.state == "broken"


@pytest.mark.parametrize("method", ["count", "count_async"])
def test_a_stream_ends_when_another_thread_closes_it(group: px.WorkerGroup, method: str) -> None:
    before = group.times_left()
    items = getattr(group, method).stream()
    begun: set[int] = set()
    while begun != {0, 1}:
        begun.add(next(items)[0])
    closer = threading.Thread(target=items.close)
    closer.start()
    for _ in items:
        pass
    closer.join()

    assert group.state == "ready"
    assert group.times_left() == [times + 1 for times in before]


def test_leaving_a_stream_interrupts_ranks_that_are_busy_with_an_item(group: px.WorkerGroup) -> None:
    async def give_up(items: Any) -> None:
        with pytest.raises(asyncio.TimeoutError):
            _ = [await asyncio.wait_for(anext(items), 0.5) for _ in range(3)]

    before = group.times_left()
    with group.hang.stream() as items:
        assert sorted([next(items), next(items)]) == [(0, 1), (1, 1)]

    assert group.times_left() == [one + 1 for one in before]
    assert (group.state, list(items)) == ("ready", [])
    if group.pool.backend == "ray":  # inline, nothing interrupts the wait
        asyncio.run(give_up(group.hang.stream()))  # and drops the stream
        assert group.times_left() == [one + 2 for one in before]


@pytest.mark.slow_on_cluster
@pytest.mark.parametrize(
    ("end", "error", "text", "state"),
    [
        (
            lambda group: faults.kill(group, 1),
            px.WorkerDiedError,
            "count(.|\n)*rank 1(.|\n)*SIGKILL",
            "broken",
        ),
        (px.WorkerGroup.restart, px.errors.StaleEpoch, "was restarted", "ready"),
        (px.WorkerGroup.close, px.GroupClosed, "was closed", "closed"),
    ],
    ids=["killed", "restarted", "closed"],
)
def test_an_open_stream_ends_with_an_error_if_its_group_loses_a_rank_restarts_or_closes(
    pool: px.ResourcePool,
    end: Callable[[px.WorkerGroup], None],
    error: type[Exception],
    text: str,
    state: str,
) -> None:
    with px.WorkerGroup(pool[2:4], Source) as group:
        items = group.count.stream()
        next(items)
        end(group)
        with pytest.raises(error, match=text):
            for _ in items:
                pass
        items.close()

        assert group.state == state


def test_ctrl_c_in_a_read_leaves_a_stream_that_a_traceback_keeps(
    group: px.WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = group.count.stream()
    next(items)
    monkeypatch.setattr(PendingStream, "here", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        list(items)

    assert group.state == "ready"
    assert group.times_left()[0] >= 1


@pytest.mark.slow_on_cluster
def test_a_worker_reads_the_stream_of_another_group(pool: px.ResourcePool, group: px.WorkerGroup) -> None:
    with px.WorkerGroup(pool[2:3], Source) as reader:
        assert reader.read(group, 2) == [[(0, 0), (0, 1), (1, 0), (1, 1)]]
        assert reader.read_some(group)[0][1] == 0
        assert reader.read(group, 1) == [[(0, 0), (1, 0)]]


def test_streams_and_calls_of_asynchronous_ranks_interleave(pool: px.ResourcePool) -> None:
    with (
        px.WorkerGroup(pool[2:4], Source, max_concurrency=4) as group,
        group.count_async.stream(buffer=2) as one,
        group.count_async.stream(buffer=2) as other,
    ):
        read = [next(items) for _ in range(5) for items in (one, other)]
        assert group.times_left() == [0, 0]
        one.close()
        other.close()

        assert len(read) == 10
        assert group.times_left() == [2, 2]


def test_streams_that_are_left_early_leak_no_threads_and_no_objects(
    group: px.WorkerGroup, backend: str
) -> None:
    group.times_left()
    before = held(backend)
    for turn in range(100):
        items = group.count.stream(buffer=2)
        begun: set[int] = set()
        while begun != {0, 1}:
            begun.add(next(items)[0])
        if turn % 2:
            items.close()
        del items

    assert all(group.times_left())
    assert within(10.0, lambda: all(map(operator.le, held(backend), before)))


def held(backend: str) -> tuple[int, int]:
    """Return the numbers of extra background threads and of objects that this process owns or borrows."""
    gc.collect()
    threads = max(0, sum(thread.name == "phalanx-background" for thread in threading.enumerate()) - 1)
    if backend == "inline":
        return threads, 0
    import ray

    worker = ray._private.worker.global_worker  # pyright: ignore[reportAttributeAccessIssue]
    return threads, len(worker.core_worker.get_all_reference_counts())
