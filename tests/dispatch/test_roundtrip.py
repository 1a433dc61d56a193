"""Rows keep their order for every mode, type of value, number of rows and number of ranks."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, tensorclass

from phalanx.collect.join import join_rows
from phalanx.declare.dispatch_modes import Dispatch
from phalanx.dispatch.shardable import register_row_type
from phalanx.dispatch.split import count_rows, split_rows
from tests.dispatch.support import Batch, FakeTarget, meshed, run, same, spec_of

Pair = collections.namedtuple("Pair", ["x", "y"])


@tensorclass
class Rollout:
    ids: torch.Tensor
    reward: torch.Tensor


@dataclasses.dataclass
class Table:
    """A row type that a user registers, with slices and joins alone."""

    rows: list[int]


register_row_type(
    Table,
    count=lambda table: torch.tensor(len(table.rows)),  # as any whole number, it may be of torch
    slice=lambda table, start, stop: Table(table.rows[start:stop]),
    concat=lambda tables: Table([row for table in tables for row in table.rows]),
)


def arrow_table(rows: int) -> pa.Table:
    return pa.table(
        {"a": pa.array(range(rows), pa.int64()), "b": pa.array(map(str, range(rows)), pa.string())}
    )


MAKERS: dict[str, Callable[[int], Any]] = {
    "tensor": lambda n: torch.arange(n * 2, dtype=torch.bfloat16).reshape(n, 2),
    "array": lambda n: np.arange(n * 3, dtype=np.int16).reshape(n, 3),
    "list": lambda n: [f"row {i}" for i in range(n)],
    "tensordict": lambda n: TensorDict({"a": torch.arange(n), "b": {"c": torch.rand(n, 2)}}, batch_size=[n]),
    "dict": lambda n: {"a": torch.arange(n), "b": {"c": np.arange(n)}, "nothing": None},
    "dataclass": lambda n: Batch(torch.arange(n), [str(i) for i in range(n)], {"w": np.ones(n)}),
    "tuple": lambda n: (torch.arange(n), list(range(n))),
    "empty": lambda n: (),
    "nested": lambda n: {"a": {}, "b": ((), {"d": [*range(n)]}), "pair": Pair(3, torch.ones(n))},
    "table": arrow_table,
    "record batch": lambda n: pa.RecordBatch.from_pylist(arrow_table(n).to_pylist(), arrow_table(n).schema),
    "records": lambda n: np.array([(i, i / 2) for i in range(n)], "i4,f8").view(np.recarray),
    "tensorclass": lambda n: Rollout(ids=torch.arange(n), reward=torch.rand(n), batch_size=[n]),
    "texts": lambda n: TensorDict({"x": torch.arange(n), "text": list(map(str, range(n)))}, batch_size=[n]),
    "registered": lambda n: Table(list(range(n))),
}
VALUES = st.tuples(st.sampled_from(sorted(MAKERS)), st.integers(0, 40)).map(lambda kn: MAKERS[kn[0]](kn[1]))
OPTIONS = st.fixed_dictionaries({"pad_to_multiple": st.sampled_from([None, 1, 2, 3, 8])})


@settings(max_examples=200, deadline=None)
@given(VALUES, st.integers(1, 9), OPTIONS)
def test_rows_split_over_ranks_are_returned_unchanged(
    value: Any, world: int, options: dict[str, Any]
) -> None:
    before = copy.deepcopy(value)
    assert same(run(spec_of(Dispatch.DP_COMPUTE_PROTO, **options), FakeTarget(world), value), before)
    assert same(value, before)


@settings(max_examples=150, deadline=None)
@given(
    VALUES,
    st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)),
    st.sampled_from(["MEGATRON_COMPUTE_PROTO", "MEGATRON_PP_AS_DP_PROTO", "mesh", "balanced"]),
    OPTIONS,
)
def test_rows_split_over_a_mesh_are_returned_unchanged(
    value: Any, axes: tuple[int, ...], mode: str, options: dict[str, Any]
) -> None:
    def lengths(value: Any) -> list[int]:
        return [(7 * row) % 11 for row in range(count_rows(value) or 0)]

    dp, pp, cp, tp = axes
    chosen = {"mesh": Dispatch.mesh("actor"), "balanced": Dispatch.mesh("actor", balance=lengths)}
    spec = spec_of(chosen.get(mode) or Dispatch[mode], **options)
    assert same(run(spec, meshed(pp=pp, dp=dp, cp=cp, tp=tp), value), value)


@settings(max_examples=100, deadline=None)
@given(VALUES, st.integers(1, 9))
def test_split_rows_and_join_rows_are_inverse(value: Any, parts: int) -> None:
    before = copy.deepcopy(value)
    pieces = split_rows(value, parts)
    counts = [count_rows(piece) or 0 for piece in pieces]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)
    assert same(join_rows(pieces), before)
    assert same(value, before)
