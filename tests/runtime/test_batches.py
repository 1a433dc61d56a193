"""Batches that go from role to role: rows and settings as they were, by value and by future alike."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch

import phalanx as px


class Role(px.Worker):
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
        return batch | {"table": pd.DataFrame({"a": [1]})}

    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def only_settings(self, batch: Any) -> Any:
        return {"temp": batch["temp"]}


@pytest.fixture(scope="module")
def role(pool: px.ResourcePool) -> px.WorkerGroup:
    return px.WorkerGroup(pool, Role)


def batch_of(rows: int) -> dict[str, Any]:
    return {"ids": torch.arange(rows), "temp": 0.7, "stop": None, "meta": {"name": "a", "nan": float("nan")}}


@pytest.mark.parametrize("rows", [0, 3, 4, 6])
def test_a_batch_that_passed_through_a_role_is_the_batch_for_the_next(
    role: px.WorkerGroup, rows: int
) -> None:
    seen = role.shown(batch_of(rows))
    future = role.extend.submit(batch_of(rows))
    assert role.shown(future) == role.shown(future.result()) == seen
    assert repr(future.result()) == repr(batch_of(rows) | {"twice": torch.arange(rows) * 2})


@pytest.mark.parametrize("rows", [4, 6])
def test_what_the_ranks_do_not_agree_on_is_refused_by_value_and_by_future(
    role: px.WorkerGroup, rows: int
) -> None:
    future = role.rank_in.submit(batch_of(rows))
    assert future.result()["mine"] == px.ByPiece([0, 1, 2, 3])
    with pytest.raises(px.DispatchError, match=r"\['mine'\]"):
        role.shown(future.result())
    with pytest.raises(px.PhalanxError, match=r"\['mine'\]"):
        role.shown(future)


def test_one_rank_alone_gives_its_value_to_the_next_role(role: px.WorkerGroup) -> None:
    future = role[2:3].rank_in.submit(batch_of(2))
    assert future.result()["mine"] == 2
    assert role.shown(future) == role.shown(future.result())


@pytest.mark.parametrize("ranks", [slice(0, 1), slice(0, 4)])
def test_tables_of_unknown_rows_are_refused_by_value_and_by_future(
    role: px.WorkerGroup, ranks: slice
) -> None:
    future = role[ranks].tables.submit(batch_of(4))
    with pytest.raises(px.DispatchError, match=r"\['table'\]"):
        role.shown(future.result())
    with pytest.raises(px.PhalanxError, match=r"\['table'\]"):
        role.shown(future)


def test_settings_alone_go_to_every_rank_by_value_and_by_future(role: px.WorkerGroup) -> None:
    settings = role.only_settings.submit(batch_of(5))
    ids = torch.arange(2)
    for given in (settings, settings.result()):
        assert role.shown({"ids": ids, "settings": given}) == ["{'settings': {'temp': 0.7}}"] * 2
