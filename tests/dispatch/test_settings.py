"""Leaves without rows: replicated and joined to one value, or refused."""

from __future__ import annotations

import collections
import datetime
import enum
import pickle
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import phalanx as px
from phalanx.collect.join import join_rows
from phalanx.declare.dispatch_modes import Dispatch
from phalanx.dispatch.batch_metadata import PerShard, differing, digest
from phalanx.dispatch.modes import plan
from phalanx.dispatch.split import count_rows, split_rows
from phalanx.errors import DispatchError
from tests.dispatch.support import FakeTarget, run, spec_of


class Kind(enum.Enum):
    GREEDY = "greedy"


PLAIN: list[Any] = [
    *(None, True, 3, 1 << 70, 0.7, float("nan"), 3j, "text", b"bytes", Kind.GREEDY, Decimal("0.1")),
    *(Path("/a"), datetime.date(2026, 1, 1), range(3), slice(1, 2), len, torch.nn.Linear),
    frozenset({"a"}),  # the order of several elements in its repr varies
    *(torch.float32, torch.device("cpu"), torch.Size([2]), np.dtype("int8"), np.float32(0.1), np.array(3)),
    *(torch.tensor(2.5), torch.tensor(float("nan"))),
    *(np.str_("x"), np.datetime64("2026-01-01"), pd.Timestamp(0)),
]
ATOMS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()


def told_apart(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"


@pytest.mark.parametrize("value", PLAIN, ids=told_apart)
def test_a_value_without_rows_is_replicated_to_every_shard_and_joined_once(value: Any) -> None:
    pieces = split_rows(value, 3)
    assert count_rows(value) is None
    assert [piece is value for piece in pieces] == [True] * 3
    assert told_apart(join_rows([pickle.loads(pickle.dumps(piece)) for piece in pieces])) == told_apart(value)


@pytest.mark.parametrize(
    "values",
    [
        *((1, 2), (1, True), (1, 1.0), (1, None), ("a", b"a")),
        *((np.int8(1), np.int16(1)), (Kind, Kind.GREEDY)),
        (torch.tensor(1), torch.tensor(1.0)),
        *((value, value) for value in (object(), lambda: 3, np.array(None))),
    ],
)
def test_values_that_differ_or_cannot_be_compared_are_joined_per_shard(values: Any) -> None:
    assert list(join_rows(list(values))) == list(values)
    assert isinstance(join_rows(list(values)), PerShard)


def test_a_single_shard_is_joined_to_its_own_value_and_very_large_integers_are_compared() -> None:
    value = object()
    assert join_rows([value]) is value
    assert join_rows([10**5000, 10**5000]) == 10**5000


def test_values_per_shard_are_a_picklable_sequence_and_can_be_replicated() -> None:
    values = px.data.PerShard([1, 2.5])
    assert (len(values), values[-1], values[0:1], list(values)) == (2, 2.5, (1,), [1, 2.5])
    assert 2.5 in values
    assert repr(values) == "PerShard([1, 2.5])"
    assert pickle.loads(pickle.dumps(values)) == values != [1, 2.5]
    seen = plan(spec_of(Dispatch.ONE_TO_ALL), FakeTarget(2), (values,), {}).arguments()
    assert list(seen)[1][0] == (values,)
    replicated = plan(spec_of(Dispatch.DP_COMPUTE_PROTO), FakeTarget(2), ([1, 2], px.replicate(values)), {})
    assert list(replicated.arguments())[1][0] == ([2], values)


@pytest.mark.parametrize(
    "table",
    [
        *(pd.DataFrame({"a": [1, 2]}), pd.Series([1, 2]), pd.Index([1, 2])),
        *(pa.array([1, 2]), pa.chunked_array([[1, 2]])),
        *(collections.deque([1, 2]), collections.UserList([1, 2])),
    ],
    ids=lambda table: type(table).__name__,
)
def test_a_table_of_an_unregistered_type_is_refused_unless_it_is_replicated(table: Any) -> None:
    for batch in ({"x": torch.zeros(2), "t": table}, {"t": table}):
        with pytest.raises(DispatchError, match=r"x\['t'\] is a .*register_row_type.*px\.replicate"):
            plan(spec_of(Dispatch.DP_COMPUTE_PROTO, lambda x: x), FakeTarget(2), (batch,), {})
    assert split_rows(px.replicate(table), 2)[1] is table


def test_a_digest_is_the_same_in_another_process() -> None:
    code = "import phalanx.dispatch.batch_metadata as m; print(m.digest(frozenset({'b', 'a', 'c'})).hex())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == digest(frozenset({"c", "b", "a"})).hex()


@given(st.lists(ATOMS, min_size=1, max_size=4))
def test_digests_of_metadata_predict_whether_joined_values_differ(values: list[Any]) -> None:
    by_piece = isinstance(join_rows([{"v": value} for value in values])["v"], PerShard)
    assert by_piece == bool(differing([(("['v']", digest(value)),) for value in values]))


def test_metadata_of_a_rank_without_rows_counts_like_that_of_other_ranks() -> None:
    def mean(x: Any) -> Any:
        return {"x": x, "mean": sum(x) / len(x) if x else None}

    assert run(spec_of(Dispatch.DP_COMPUTE_PROTO), FakeTarget(2), [4.0], method=mean)["mean"] == PerShard(
        [4.0, None]
    )
