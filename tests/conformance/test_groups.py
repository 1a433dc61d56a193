"""Behavior of a group that does not depend on the backend, on each backend."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx as px

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup  # pyright: ignore[reportMissingImports]


class Probe(px.Worker):
    def __init__(self, start: float = 0.0) -> None:
        self.value = torch.zeros(2) + self.rank + start

    @px.register(px.Dispatch.ONE_TO_ALL)
    def add(self, x: float) -> Any:
        self.value += x
        return self.value.clone()

    @px.register(px.Dispatch.ONE_TO_ALL)
    def overwrite(self, tensor: Any) -> float:
        if self.rank == 0:
            tensor.fill_(-1.0)
        return float(tensor.sum())

    @px.register(px.Dispatch.ROWS)
    def rows(self, batch: Any) -> Any:
        return batch

    @px.register(px.Dispatch.DP_COMPUTE)
    def dealt(self, x: Any) -> Any:
        return (self.rank, x)

    @px.register(px.Dispatch.ALL_TO_ALL, px.Execute.RANK_ZERO)
    def only_zero(self, x: Any) -> Any:
        return (self.rank, x)

    @px.register(px.Dispatch.ONE_TO_ALL, blocking=False)
    def later(self, x: Any) -> Any:
        return x

    @px.register
    async def coroutine(self, x: int) -> int:
        await asyncio.sleep(0)
        return x + self.rank

    @px.register
    def fail(self, kind: str, rank: int) -> str:
        if self.rank != rank:
            return "fine"
        if kind == "unicode":
            b"\xff".decode("utf-8")
        if kind == "group":
            raise ExceptionGroup("two", [ValueError("a"), KeyError("b")])
        if kind == "unpicklable":
            raise RuntimeError("cannot travel", threading.Lock())
        raise ValueError(f"bad value on rank {self.rank}")

    @px.register
    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def unregistered(self, x: int) -> int:
        return x * 10


@pytest.fixture(scope="module")
def group(pool: px.ResourcePool) -> Iterator[Any]:
    with px.WorkerGroup(pool, Probe.bind(start=1.0)) as made:
        yield made


def test_a_value_reaches_every_rank_and_ranks_know_their_number_and_world_size(group: Any) -> None:
    before = [value.tolist() for value in group.add(0)]
    after = [value.tolist() for value in group.add(2)]
    assert after == [[x + 2 for x in row] for row in before]
    assert group.run(lambda worker: worker.rank) == list(range(group.world_size))
    assert group.environment("RANK") == [str(rank) for rank in range(group.world_size)]
    assert group.environment("WORLD_SIZE") == [str(group.world_size)] * group.world_size
    assert [row["rank"] for row in group.explain().to_dict()["rows"]] == list(range(group.world_size))


def test_rows_are_returned_in_order_and_ranks_without_rows_are_called(group: Any) -> None:
    for rows in (0, 1, 3, 17):
        x = torch.arange(rows * 2).reshape(rows, 2)
        assert torch.equal(group.rows({"x": x, "name": "constant"})["x"], x)
    outputs = dict(group.rows.submit(torch.zeros(1, 2)).stream())
    assert sorted(outputs) == list(range(group.world_size))


def test_a_list_is_dealt_to_ranks_and_invalid_arguments_are_refused_before_a_call_is_sent(group: Any) -> None:
    given = [f"for {rank}" for rank in range(group.world_size)]
    assert group.dealt(given) == list(enumerate(given))
    calls = group.statistics()["calls"]
    with pytest.raises(px.DispatchError, match=str(group.world_size)):
        group.dealt(["too short"])
    with pytest.raises(px.DispatchError, match="add"):
        group.add(1, 2, 3)
    with pytest.raises(px.DispatchError, match="generator"):
        group.later(n for n in range(3))
    assert group.statistics()["calls"] == calls


def test_a_single_rank_returns_its_value_and_a_slice_a_list(group: Any) -> None:
    assert group.only_zero("x") == (0, "x")
    assert group[2].coroutine(5) == 7
    assert group[1:3].coroutine(5) == [6, 7]
    assert group.any.environment("RANK") in {str(rank) for rank in range(group.world_size)}


def test_a_future_can_be_waited_for_awaited_gathered_and_passed_as_an_argument(group: Any) -> None:
    async def driver() -> Any:
        return await group.coroutine.submit(1)

    future, rows = group.later("x"), torch.arange(7)
    assert isinstance(future, px.CallFuture)
    assert future.result() == ["x"] * group.world_size
    assert asyncio.run(driver()) == [1 + rank for rank in range(group.world_size)]
    futures = [group.coroutine.submit(n) for n in range(3)]
    assert [values[0] for values in px.gather(*futures)] == [0, 1, 2]
    assert torch.equal(group.rows(group.rows.submit(rows)), rows)


def test_unregistered_methods_are_called_by_name_and_execute_all_deals_only_lists_of_world_size(
    group: Any,
) -> None:
    n = group.world_size
    assert group.call("unregistered", 2) == [20] * n
    with pytest.raises(AttributeError, match="unregistered"):
        _ = group.unregistered
    assert group.execute_all_sync("unregistered", list(range(n))) == [10 * i for i in range(n)]
    assert group.execute_all_sync("unregistered", 3) == [30] * n
    assert group.execute_rank_zero_sync("unregistered", 3) == 30
    assert group.execute_all_async("unregistered", x=4).result() == [40] * n


def test_writes_of_a_rank_are_private_and_a_stored_value_serves_many_calls(group: Any) -> None:
    for count in (8, 300_000):  # the larger tensor is stored once for all ranks
        given = torch.ones(count)
        assert group.overwrite(given) == [-count] + [count] * (group.world_size - 1)
        assert given.sum() == count
    stored = px.put(px.replicate(torch.ones(50_000)), backend=group.pool.backend)
    sums = [-50_000] + [50_000] * (group.world_size - 1)
    assert [group.overwrite(stored), group.overwrite(stored)] == [sums, sums]


def test_a_failure_names_its_rank_keeps_its_type_and_leaves_the_group_ready(group: Any) -> None:
    for rank in (1, 0):
        with pytest.raises(ValueError, match=f"rank {rank}") as caught:
            group.fail("value", rank)
        assert isinstance(caught.value, px.RemoteCallError)
        assert caught.value.ranks == (rank,)
    with pytest.raises(UnicodeDecodeError, match="rank 1"):
        group.fail("unicode", 1)
    with pytest.raises(px.RemoteCallError, match="rank 1"):
        group.fail("unpicklable", 1)
    assert group.state == "ready"
    assert group.coroutine(0) == list(range(group.world_size))


def test_an_output_that_cannot_be_unpickled_is_an_error_of_its_rank_alone(group: Any) -> None:
    with pytest.raises(px.RemoteCallError, match=r"rank 1 .*unpickled") as caught:
        group.run(lambda worker: Unreadable() if worker.rank == 1 else worker.rank)
    assert caught.value.ranks == (1,)
    assert group.state == "ready"
    with pytest.raises(px.PhalanxError, match="not a number"):
        px.put(Unreadable(), backend=group.pool.backend).get()


def test_an_exception_group_is_raised_as_an_exception_group(group: Any) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        group.fail("group", 1)
    assert "rank 1" in str(caught.value)
    matched, rest = caught.value.split(ValueError)
    assert [type(one) for one in (*matched.exceptions, *rest.exceptions)] == [ValueError, KeyError]


def test_the_backend_reads_the_files_of_every_rank(group: Any) -> None:
    transport, endpoints = group.core.backend, group.core.endpoints
    paths = [endpoint.facts.files + ".test" for endpoint in endpoints]
    Path(paths[0]).parent.mkdir(parents=True, exist_ok=True)
    group.run(lambda worker: Path(paths[worker.rank]).write_text(f"rank {worker.rank}"))
    assert [transport.read(e, p, 0, 100) for e, p in zip(endpoints, paths, strict=True)] == [
        f"rank {rank}".encode() for rank in range(group.world_size)
    ]
    assert transport.read(endpoints[1], paths[1], 5, 100) == b"1"
    assert transport.read(endpoints[1], paths[1], -3, 2) == b"k "
    assert transport.read(endpoints[1], paths[1], 100, 1) == b""
    with pytest.raises(FileNotFoundError, match="missing"):
        transport.read(endpoints[1], paths[1] + ".missing", 0, 1)


def test_a_closed_group_refuses_calls_and_can_be_closed_again(pool: px.ResourcePool) -> None:
    group = px.WorkerGroup(pool, Probe)
    group.close()
    group.close()
    with pytest.raises(px.GroupClosed, match="closed"):
        group.add(1)


def test_a_constructor_that_raises_leaves_no_group(pool: px.ResourcePool) -> None:
    before = len(pool.groups)
    with pytest.raises(px.WorkerInitError, match="rank 1") as caught:
        px.WorkerGroup(pool, FailsOnRankOne)
    assert isinstance(caught.value, ValueError)
    assert len(pool.groups) == before


class Unreadable:
    """A value that can be pickled but not unpickled."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


class FailsOnRankOne(px.Worker):
    def __init__(self) -> None:
        if self.rank == 1:
            raise ValueError("rank 1 has no licence")
