"""Joining outputs of ranks into one value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tensordict import TensorDict

from phalanx.collect.join import gather, join_rows
from phalanx.dispatch.batch_metadata import PerShard
from phalanx.dispatch.plan import GatherPlan
from phalanx.errors import DispatchError
from tests.dispatch.support import Batch, same


def rows(count: int, **fields: Any) -> GatherPlan:
    return GatherPlan("join", range(count), **fields)


def test_outputs_are_joined_with_keys_in_any_order_and_more_rows_than_their_shards() -> None:
    assert join_rows([{"a": [1], "b": [2]}, {"b": [4], "a": [3]}]) == {"a": [1, 3], "b": [2, 4]}
    out = gather(rows(2, rows=[1, 2]), [torch.arange(3), torch.arange(5)])
    assert out.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ([torch.zeros(1), torch.zeros(1), None], r"ranks 0, 1 returned a Tensor .*; rank 2 returned None"),
        ([[1], torch.zeros(1), [2, 3]], r"ranks 0, 2 returned a list; rank 1 returned a Tensor"),
        ([{"a": 1}, {"b": 1}, {"a": 1}], r"ranks 0, 2 returned a dict of a; rank 1 returned a dict of b"),
        ([(1, 2), (1,), (1, 2)], r"rank 1 returned a tuple of 1 elements"),
        ([torch.zeros(2), torch.tensor(1.0), torch.zeros(1)], r"rank 1 returned a Tensor of shape \(\)"),
        ([torch.zeros(1, 2), torch.zeros(1, 3), torch.zeros(1, 2)], r"rank 1 .* shape \(1, 3\)"),
        ([np.zeros((1, 2)), np.zeros((1, 3)), np.zeros((1, 2))], r"rank 1 .* shape \(1, 3\)"),
        ([{"a": Batch([1], [])}, {"a": Batch(None, [])}, {"a": Batch(None, [])}], r"at \['a'\]\.ids"),
    ],
)
def test_outputs_that_cannot_be_joined_are_an_error_with_ranks_and_place(
    outputs: list[Any], text: str
) -> None:
    with pytest.raises(DispatchError, match=text):
        gather(rows(3), outputs)


def test_ranks_of_a_slice_are_named_as_ranks_of_the_group() -> None:
    with pytest.raises(DispatchError, match="rank 4 returned a list; rank 6 returned None"):
        gather(rows(2, ranks=(4, 6)), [[1], None])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_without_a_shape_and_tables_with_different_columns_are_refused() -> None:
    with pytest.raises(DispatchError, match=r"piece 0 returned a nested Tensor of dtype torch\.float32"):
        join_rows([torch.nested.nested_tensor([torch.zeros(2)]), None])
    dicts = [TensorDict({name: torch.zeros(1)}, batch_size=[1]) for name in "ab"]
    for outputs in (dicts, [pa.table({"a": [1]}), pa.table({"b": [1]})]):
        with pytest.raises(DispatchError, match="cannot be joined"):
            join_rows(outputs)


def test_an_output_without_rows_does_not_change_dtype_or_shape_of_the_result() -> None:
    out = join_rows([torch.ones(2, 5, dtype=torch.int64), torch.tensor([])])
    assert same(out, torch.ones(2, 5, dtype=torch.int64))


@pytest.mark.parametrize("count", [1, 2])
def test_the_result_shares_no_memory_with_the_outputs(count: int) -> None:
    array = np.arange(4.0)
    array.flags.writeable = False
    tensor, scalar, inner = torch.arange(4), torch.tensor(1), torch.arange(2)
    output = {"t": tensor, "a": array, "s": scalar, "l": [inner, {"x": inner}]}
    output["d"] = [TensorDict({"x": inner}, batch_size=[2]), TensorDict({"x": inner}, batch_size=[])]
    output["o"] = np.array([inner, None], dtype=object)
    joined = join_rows([output] * count)
    for name in ("t", "a", "s"):
        joined[name] += 1
    joined["l"][0] += 1
    joined["l"][1]["x"] += 1
    joined["d"][0]["x"] += 1
    joined["d"][1]["x"] += 1
    joined["o"][0] += 1
    assert (tensor.tolist(), array.tolist()) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert (scalar.item(), inner.tolist()) == (1, [0, 1])


def test_joined_arrow_tables_own_their_memory() -> None:
    table = pa.table({"a": np.arange(100)})
    joined = join_rows([table])
    assert joined.equals(table)
    theirs = table.column("a").chunk(0).buffers()[1].address
    assert joined.column("a").chunk(0).buffers()[1].address != theirs


def test_only_leaves_with_as_many_rows_as_the_padded_shard_are_trimmed() -> None:
    plan = rows(2, trim=[(4, 3), (4, 4)])
    outputs = [
        {"rows": [0, 1, 2, 0], "losses": [9, 9], "histogram": [1] * 8, "text": "abcd"},
        {"rows": [3, 4, 5, 6], "losses": [8, 8], "histogram": [2] * 8, "text": "efgh"},
    ]
    assert gather(plan, outputs) == {
        "rows": [0, 1, 2, 3, 4, 5, 6],
        "losses": [9, 9, 8, 8],
        "histogram": [1] * 8 + [2] * 8,
        "text": PerShard(["abcd", "efgh"]),
    }
