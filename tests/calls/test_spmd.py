"""Debug mode: ranks that diverged are named."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import phalanx as px
from phalanx.calls.divergence_check import check_order, check_replicated, same
from tests.support.fault_workers import Trouble


@pytest.fixture
def group(here: px.ResourcePool, monkeypatch: pytest.MonkeyPatch) -> px.WorkerGroup:
    monkeypatch.setenv("PHALANX_DEBUG", "1")
    return px.WorkerGroup(here, Trouble)


def test_a_rank_whose_replicated_output_differs_is_named(group: px.WorkerGroup) -> None:
    assert group.norm() == [2.0, 2.0, 2.0]

    with pytest.raises(px.errors.RanksDiverged, match=r"rank 1 returned 1\.0 where rank 0") as raised:
        group.norm(1)

    assert raised.value.ranks == (1,)
    assert group.state == "ready"


def test_a_rank_that_ran_the_calls_in_another_order_is_named(group: px.WorkerGroup) -> None:
    group.ping()
    group.what_is_loaded()
    group.core.endpoints[2].handle.runtime.call_log.reverse()

    with pytest.raises(px.errors.RanksDiverged, match="rank 2 did not run the calls in the order"):
        group.ping()


def test_outputs_that_stay_on_their_ranks_or_cannot_be_compared_have_not_diverged(
    group: px.WorkerGroup,
) -> None:
    assert group.keep_a_lock() is None
    sparse = torch.eye(2).to_sparse()
    check_replicated("group", "method", range(2), [sparse, sparse])
    assert not same((sparse, 1), (sparse, 2))


def test_outputs_are_not_compared_without_debug_mode(
    here: px.ResourcePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PHALANX_DEBUG", raising=False)
    assert px.WorkerGroup(here, Trouble).norm(1) == [2.0, 1.0, 2.0]


@given(st.lists(st.integers(0, 50), unique=True), st.data())
def test_ranks_that_remember_different_calls_in_one_order_have_not_diverged(
    numbers: list[int], data: st.DataObject
) -> None:
    calls = [(number, "f") for number in numbers]
    kept = st.lists(st.booleans(), min_size=len(calls), max_size=len(calls))
    orders = [[c for c, keep in zip(calls, data.draw(kept), strict=True) if keep] for _ in range(3)]

    check_order("g", "f", orders)


def test_ranks_that_differ_from_the_majority_are_named() -> None:
    a, b = (1, "save"), (2, "load")

    with pytest.raises(px.errors.RanksDiverged, match=r"ran save \(call 1\) where rank 1 ran load") as order:
        check_order("g", "f", [[a, b], [b, a], [b, a]])
    with pytest.raises(px.errors.RanksDiverged) as outputs:
        check_replicated("g", "f", (4, 5, 6), [1, 1, 2])

    assert (order.value.ranks, outputs.value.ranks) == ((0,), (6,))


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (torch.tensor([math.nan]), torch.tensor([math.nan]), True),
        (torch.zeros(0, dtype=torch.bfloat16), torch.zeros(0, dtype=torch.bfloat16), True),
        (pd.DataFrame({"a": [1]}), pd.DataFrame({"a": [2]}), False),
        (torch.tensor(1.0), torch.tensor(2.0), False),
        (torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16), True),
        (np.arange(3), np.arange(3), True),
        (math.nan, math.nan, True),
        (1, 1.0, False),
        ({"a": [1, (2,)]}, {"a": [1, (2,)]}, True),
        ({"a": 1}, {"b": 1}, False),
    ],
)
def test_outputs_are_compared_bit_for_bit(a: Any, b: Any, equal: bool) -> None:
    assert same(a, b) is equal
