"""Batches passed from role to role keep their rows and metadata, by value and by future alike."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import phalanx as px

SLOW_ON_RAY = True


class Source(px.Worker):
    """Returns rows in every way that a call can return them."""

    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def extend(self, batch: Any) -> Any:
        return batch | {"twice": batch["ids"] * 2}

    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def rank_in(self, batch: Any) -> Any:
        return batch | {"mine": self.rank}

    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def shown(self, batch: Any) -> list[str]:
        return [repr({key: value for key, value in batch.items() if key not in ("ids", "twice")})] * len(
            batch["ids"]
        )

    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def tables(self, batch: Any) -> Any:
        import pandas as pd

        return batch | {"table": pd.DataFrame({"a": [1]})}

    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def only_settings(self, batch: Any) -> Any:
        return {key: value for key, value in batch.items() if key == "temp"}

    @px.register
    def listed(self) -> Any:
        return torch.full((50_000,), float(self.rank))

    @px.register(px.Dispatch.RANK_ZERO)
    def valued(self) -> Any:
        return torch.arange(8.0).repeat_interleave(50_000).reshape(8, 50_000)

    @px.register(px.Dispatch.DP_COMPUTE_METRIC, pad_to_multiple=3)
    def metric(self, rows: Any) -> Any:
        return rows

    @px.register(px.Dispatch.DP_COMPUTE_PROTO, pad_to_multiple=3)
    def padded(self, rows: Any) -> Any:
        return {"rows": rows, "temp": 0.7}

    @px.register(px.Dispatch.mesh(balance="lengths"))
    def balanced(self, rows: Any, lengths: Any) -> Any:
        return rows

    @px.register(px.Dispatch.mesh(balance="lengths"))
    def doubled(self, rows: Any, lengths: Any) -> Any:
        return rows.repeat_interleave(2, dim=0)

    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def of_the_last(self, rows: Any) -> Any:
        return rows if self.rank == 3 else rows[:0].double()

    @px.register
    def wait_for(self, path: str) -> str:
        while not os.path.exists(path):
            time.sleep(0.01)
        return path


class Sink(px.Worker):
    @px.register(px.Dispatch.DP_COMPUTE_METRIC)
    def rows(self, x: Any) -> Any:
        return x

    @px.register(px.Dispatch.DP_COMPUTE_METRIC, pad_to_multiple=2)
    def padded_rows(self, ids: Any, x: Any) -> Any:
        return x, len(x)  # counts the padding rows too, which are removed from results

    @px.register
    def add_one(self, x: Any) -> float:
        first = x[0] if isinstance(x, list) else x
        first += 1
        return float(first.flatten()[0])


@pytest.fixture(scope="module")
def source(pool: px.ResourcePool) -> px.WorkerGroup:
    return px.WorkerGroup(pool, Source, mesh=px.Mesh(dp=4))


@pytest.fixture(scope="module")
def sink(pool: px.ResourcePool) -> px.WorkerGroup:
    return px.WorkerGroup(pool[0:3], Sink)


def batch_of(rows: int) -> dict[str, Any]:
    return {"ids": torch.arange(rows), "temp": 0.7, "stop": None, "meta": {"name": "a", "nan": float("nan")}}


@pytest.mark.parametrize("rows", [0, 3, 4, 6])
def test_a_batch_keeps_its_rows_and_metadata_through_a_role(source: px.WorkerGroup, rows: int) -> None:
    seen = source.shown(batch_of(rows))
    future = source.extend.submit(batch_of(rows))
    assert source.shown(future) == source.shown(future.result()) == seen
    assert repr(future.result()) == repr(batch_of(rows) | {"twice": torch.arange(rows) * 2})


@pytest.mark.parametrize("rows", [4, 6])
def test_metadata_that_differs_by_rank_is_refused_by_value_and_by_future(
    source: px.WorkerGroup, rows: int
) -> None:
    future = source.rank_in.submit(batch_of(rows))
    assert future.result()["mine"] == px.data.PerShard([0, 1, 2, 3])
    with pytest.raises(px.DispatchError, match=r"\['mine'\]"):
        source.shown(future.result())
    with pytest.raises(px.PhalanxError, match=r"\['mine'\]"):
        source.shown(future)


def test_metadata_of_a_single_rank_passes_to_the_next_role(source: px.WorkerGroup) -> None:
    future = source[2:3].rank_in.submit(batch_of(2))
    assert future.result()["mine"] == 2
    assert source.shown(future) == source.shown(future.result())


@pytest.mark.parametrize("ranks", [slice(0, 1), slice(0, 4)])
def test_tables_of_an_unregistered_type_are_refused_by_value_and_by_future(
    source: px.WorkerGroup, ranks: slice
) -> None:
    future = source[ranks].tables.submit(batch_of(4))
    with pytest.raises(px.DispatchError, match=r"\['table'\]"):
        source.shown(future.result())
    with pytest.raises(px.PhalanxError, match=r"\['table'\]"):
        source.shown(future)


def test_metadata_without_rows_reaches_every_rank_by_value_and_by_future(source: px.WorkerGroup) -> None:
    ids = torch.arange(2)
    for batch, shown in ((batch_of(5), "{'temp': 0.7}"), ({"ids": ids}, "{}")):
        settings = source.only_settings.submit(batch)
        for given in (settings, settings.result()):
            assert source.shown({"ids": ids, "settings": given}) == [f"{{'settings': {shown}}}"] * 2


def calls_of(source: px.WorkerGroup) -> dict[str, px.CallFuture[Any]]:
    rows, lengths = torch.arange(7.0)[:, None].repeat(1, 3), [5, 1, 1, 1, 1, 1, 9]
    return {
        "listed": source.listed.submit(),
        "of a slice": source[1:3].listed.submit(),
        "valued": source.valued.submit(),
        "metric": source.metric.submit(rows),
        "padded": source.padded.submit(rows),
        "balanced": source.balanced.submit(rows, lengths),
        "doubled": source.doubled.submit(rows, lengths),
        "fewer rows than ranks": source.padded.submit(rows[:2]),
        "rows of the last rank alone": source.of_the_last.submit(rows[-4:]),
        "no rows": source.balanced.submit(rows[:0], lengths[:0]),
    }


@pytest.mark.parametrize("name", list(calls_of(MagicMock())))
def test_a_future_and_its_result_send_each_rank_the_same_rows(
    source: px.WorkerGroup, sink: px.WorkerGroup, name: str
) -> None:
    future = calls_of(source)[name]
    assert repr(sink.rows(future)) == repr(sink.rows(future.result()))


@pytest.mark.parametrize(("name", "rows"), [("listed", 4), ("balanced", 7)])
def test_a_future_is_padded_like_its_value(
    source: px.WorkerGroup, sink: px.WorkerGroup, name: str, rows: int
) -> None:
    future, ids = calls_of(source)[name], list(range(rows))
    assert repr(sink.padded_rows(ids, future)) == repr(sink.padded_rows(ids, future.result()))


def test_futures_of_one_rank_and_of_all_ranks_are_padded_together(
    source: px.WorkerGroup, sink: px.WorkerGroup
) -> None:
    joined, of_one_rank = source.padded.submit(torch.arange(8.0)), source.valued.submit()
    by_value = sink.padded_rows(list(range(8)), {"x": joined.result(), "y": of_one_rank.result()})

    assert repr(sink.padded_rows(list(range(8)), {"x": joined, "y": of_one_rank})) == repr(by_value)


@pytest.mark.parametrize("name", ["listed", "valued", "padded"])
def test_a_future_with_another_number_of_rows_than_the_arguments_is_refused(
    source: px.WorkerGroup, sink: px.WorkerGroup, name: str
) -> None:
    with pytest.raises(px.PhalanxError, match="disagree in rows"):
        sink.padded_rows([0, 1], calls_of(source)[name])


def test_futures_and_channel_batches_with_different_numbers_of_rows_are_refused(
    source: px.WorkerGroup, sink: px.WorkerGroup, backend: str
) -> None:
    calls = calls_of(source)
    with px.Channel() as channel:
        channel.put([0, 1, 2, 3])
        channel.put([0, 1, 2])
        batches = [channel.take_rows(4), channel.take_rows(3)]
        for one, other in ((calls["listed"], calls["valued"]), (batches[0], calls["valued"]), tuple(batches)):
            with pytest.raises(px.PhalanxError, match="disagree in rows"):
                sink.rows({"one": one, "other": other})
        assert len(sink.rows({"one": batches[0], "other": calls["listed"]})) == 3
        for batch in batches:
            batch.ack()


@pytest.mark.parametrize("name", ["listed", "valued"])
def test_writes_of_ranks_to_an_argument_do_not_change_its_future(
    source: px.WorkerGroup, sink: px.WorkerGroup, name: str
) -> None:
    future = calls_of(source)[name]
    assert [sink.add_one(future), sink.add_one(future)] == [[1.0] * 3] * 2


def test_submit_does_not_wait_for_a_future_argument_with_a_row_by_rank(
    source: px.WorkerGroup, sink: px.WorkerGroup, backend: str, tmp_path: Path
) -> None:
    if backend == "inline":
        pytest.skip("calls of this backend have ended when they are submitted")
    go = tmp_path / "go"
    call = sink.rows.submit(source.wait_for.submit(str(go)))
    assert not call.done()
    go.touch()
    assert call.result() == [[str(go)] * 2, [str(go)], [str(go)]]
