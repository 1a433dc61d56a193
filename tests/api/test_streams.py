"""Methods that yield: their items one by one, or all at once."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import phalanx as px

MANY = 10_000


class Source(px.Worker):
    def __init__(self) -> None:
        self.made = 0

    @px.register
    def count(self, n: int) -> Iterator[int]:
        for index in range(n):
            self.made = index + 1
            yield index

    @px.register
    async def count_async(self, n: int) -> AsyncIterator[int]:
        for index in range(n):
            await asyncio.sleep(0)
            yield index

    @px.register(px.Dispatch.ROWS)
    def tenfold(self, rows: list[int]) -> Iterator[int]:
        for row in rows:
            yield 10 * row

    @px.register(px.Dispatch.RANK_ZERO)
    def alone(self, n: int) -> Iterator[int]:
        yield from range(n)

    @px.register(px.Dispatch.mesh())
    def by_mesh(self, rows: list[int]) -> Iterator[tuple[int, int]]:
        for row in rows:
            yield self.rank, row

    @px.register
    def given(self, **options: int) -> dict[str, int]:
        return options

    @px.register(collect="none")
    def nothing(self) -> Iterator[int]:
        yield 1

    @px.register
    def fail(self, rank: int) -> Iterator[int]:
        yield self.rank
        if self.rank == rank:
            raise ValueError(f"rank {rank} has no more")
        while True:
            yield -1

    @px.register
    def arrays(self) -> Iterator[Any]:
        import numpy as np

        for index in range(3):
            yield np.full(1000, index)

    @px.register
    def unreadable(self) -> Iterator[Any]:
        yield 1
        yield threading.Lock()

    @px.register
    def progress(self) -> int:
        return self.made

    @px.register(px.Dispatch.ALL_TO_ALL)
    def dealt(self, x: Any) -> Any:
        return x

    @px.register
    def take(self, x: Any) -> Any:
        return x


@pytest.fixture(scope="module")
def group(pool: px.ResourcePool) -> Any:
    return px.WorkerGroup(pool[0:2], Source)


@pytest.fixture(scope="module")
def squares(pool: px.ResourcePool) -> Any:
    return px.WorkerGroup(pool, Source, mesh=px.Mesh(dp=2, tp=2))


@pytest.mark.parametrize("method", ["count", "count_async"])
def test_a_stream_keeps_the_order_of_each_rank_and_a_plain_call_returns_lists(
    group: Any, method: str
) -> None:
    items = list(getattr(group, method).stream(5))

    for rank in (0, 1):
        assert [item for of, item in items if of == rank] == list(range(5))
    assert getattr(group, method)(3) == [[0, 1, 2], [0, 1, 2]]


def test_items_of_split_rows_are_joined_in_order(group: Any) -> None:
    assert group.tenfold([1, 2, 3, 4, 5]) == [10, 20, 30, 40, 50]
    assert group.tenfold.submit([1, 2, 3]).result() == [10, 20, 30]


def test_a_future_can_be_streamed_repeatedly_and_keeps_its_result(group: Any) -> None:
    future = group.count.submit(30)
    for _ in future.stream():
        break  # which does not end the call

    assert sorted(future.stream()) == [(rank, item) for rank in (0, 1) for item in range(30)]
    assert future.result() == [list(range(30))] * 2
    assert len(list(future.stream())) == 60


def test_futures_of_generators_can_be_awaited_and_gathered(group: Any) -> None:
    async def both() -> tuple[Any, Any]:
        return await group.count.submit(2), await group.tenfold.submit([1, 2])

    assert asyncio.run(both()) == ([[0, 1], [0, 1]], [10, 20])
    assert px.gather(group.count.submit(2), group.take.submit(1)) == [[[0, 1], [0, 1]], [1, 1]]


def test_a_stream_of_one_rank_has_items_without_rank_numbers(group: Any) -> None:
    assert list(group.alone.stream(3)) == [0, 1, 2]
    assert list(group[1].count.stream(3)) == [0, 1, 2]
    assert list(group.any.count.stream(3)) == [0, 1, 2]
    assert list(group[1].count.submit(3).stream()) == [0, 1, 2]
    assert (group.alone(2), group[1].count(2)) == ([0, 1], [0, 1])


@pytest.mark.soak_on_cluster
def test_a_stream_in_a_mesh_mode_has_the_items_of_the_collecting_ranks(squares: Any) -> None:
    assert sorted(squares.by_mesh.stream([5, 6])) == [(0, (0, 5)), (2, (2, 6))]
    assert list(squares[3].by_mesh.stream([7])) == [(2, 7)]
    assert squares.by_mesh([5, 6]) == [(0, 5), (2, 6)]


def test_arrays_are_streamed_unchanged_and_collect_none_streams_nothing(group: Any) -> None:
    items = [(rank, item.sum()) for rank, item in group.arrays.stream()]

    assert sorted(items) == [(rank, 1000 * index) for rank in (0, 1) for index in range(3)]
    assert list(group.nothing.stream()) == []
    assert group.nothing() is None


@pytest.mark.parametrize("buffer", [1, 4])
def test_a_slow_reader_holds_back_its_ranks(group: Any, buffer: int) -> None:
    read = []
    with group.count.stream(MANY, buffer=buffer) as items:
        while {of for of, _ in read} != {0, 1} or len(read) < 6:
            read.append(next(items))
    made = group.progress()

    # Leaving reads the buffered items, and a rank may yield as many again before its interrupt arrives.
    for rank in (0, 1):
        assert made[rank] <= sum(1 for of, _ in read if of == rank) + 2 * buffer


def test_an_unbounded_stream_is_complete_and_yields_nothing_after_its_end(group: Any) -> None:
    items = group.count.stream(50, buffer=None)
    assert len(list(items)) == 100
    items.close()

    assert list(items) == []


def test_a_rank_that_fails_ends_the_stream_with_the_error_of_the_call(group: Any) -> None:
    items = group.fail.stream(1)
    with pytest.raises(ValueError, match=r"fail(.|\n)*rank 1(.|\n)*no more") as raised:
        list(items)

    assert isinstance(raised.value, px.RemoteCallError)
    assert [report.rank for report in raised.value.failures if not report.victim] == [1]
    for ask in (lambda: next(items), lambda: group[1].fail(1), group[1].fail.submit(1).result):
        with pytest.raises(ValueError, match="no more"):
            ask()
    with pytest.raises(px.RemoteCallError, match=r"rank 0(.|\n)*pickle"):
        list(group.unreadable.stream())
    assert group.take(1) == [1, 1]


def test_an_event_loop_reads_a_stream_and_its_error(group: Any) -> None:
    async def read(stream: Any) -> list[Any]:
        async with stream as items:
            return [item async for item in items]

    found = asyncio.run(read(group.count.stream(4)))
    assert sorted(found) == [(rank, item) for rank in (0, 1) for item in range(4)]
    with pytest.raises(ValueError, match="no more"):
        asyncio.run(read(group.fail.stream(0)))


def test_a_stream_is_refused_as_an_argument_and_cannot_be_pickled(group: Any) -> None:
    with pytest.raises(px.DispatchError, match=r"px\.Channel"):
        group.dealt(group.count.submit(1))
    for given in (group.count.stream(1), group.count.submit(1)):
        with pytest.raises(px.DispatchError, match=r"count cannot be an argument(.|\n)*px\.Channel"):
            group.take(given)
        with pytest.raises(px.DispatchError, match=r"px\.Channel"):
            group.take([given])
    with group.count.stream(1) as items, pytest.raises(px.DispatchError, match=r"px\.Channel"):
        pickle.dumps(items)


@pytest.mark.parametrize("concurrency", [pytest.param(None, marks=pytest.mark.soak_on_cluster), 2])
def test_a_trace_counts_the_items_that_each_rank_yielded(
    pool: px.ResourcePool, concurrency: int | None
) -> None:
    with px.WorkerGroup(pool[2:4], Source, max_concurrency=concurrency) as group:
        with px.trace() as trace:
            list(group.count_async.stream(3))
            group.count_async(2)
        streamed, whole = [call for call in trace.events.calls if call.method == "count_async"]

    assert [part.items for part in streamed.parts] == [3, 3]
    assert all(part.returned and part.fetched for part in streamed.parts)
    assert [part.items for part in whole.parts] == [None, None]


def test_explain_says_that_a_method_yields(group: Any) -> None:
    assert "the list of a rank's items; .stream(...) gives (rank, item) of ranks 0, 1" in str(
        group.count.explain(1)
    )
    assert "gives items of rank 1" in str(group[1].count.explain(1))
    assert "yields" in str(px.explain(group[:]))


def test_a_method_that_returns_receives_arguments_named_like_stream_options(group: Any) -> None:
    assert sorted(group.given.stream(by=1)) == [(rank, {"by": 1}) for rank in group.ranks]
