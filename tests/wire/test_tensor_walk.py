"""Sizes of values and their large leaves, found without encoding."""

from __future__ import annotations

import dataclasses
import types
from collections import UserDict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from phalanx.wire.codec import encode
from phalanx.wire.tensor_walk import large_leaves, nbytes_of


@dataclasses.dataclass
class Batch:
    ids: Any
    rest: Any


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


class NeedsAnOpenFile:
    @property
    def nbytes(self) -> int:
        raise ValueError("closed file")

    def __reduce__(self) -> Any:
        return NeedsAnOpenFile, ()


class PicklesItself:
    def __init__(self) -> None:
        self.cache = torch.zeros(1000)

    def __reduce__(self) -> Any:
        return PicklesItself, ()


def captured(tensor: torch.Tensor) -> Any:
    return lambda: tensor


BIG = torch.zeros(1000)
LOOP: dict[str, Any] = {"x": BIG}
LOOP["self"] = LOOP


@pytest.mark.parametrize(
    "value",
    [
        BIG,
        BIG.numpy(),
        [BIG],
        (1, {"x": BIG}),
        {BIG: 1},
        Batch(BIG, None),
        Plain([BIG]),
        UserDict(x=BIG),
        captured(BIG),
        torch.nn.Linear(500, 2, bias=False),
        [BIG, BIG, (BIG,)],
        LOOP,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_large_leaf_is_found_and_counted_once_in_any_container(value: Any) -> None:
    assert 4000 <= nbytes_of(value) < 4300
    assert [leaf.nbytes for leaf in large_leaves(value, 1000)] == [4000]


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [
        (None, 1, 10),
        ("x" * 1000, 1000, 1000),
        (b"x" * 1000, 1000, 1000),
        ([1] * 1000, 1000, 10_000),
        (["ab"] * 1000, 2000, 2000),
        (list(range(500)) + ["text" * 10] * 10, 500, 5000),
        ({"a": 1, "b": [2.0]}, 10, 100),
        (PicklesItself(), 1, 100),
        (NeedsAnOpenFile(), 1, 100),
        (torch.ones(9, 9).to_mkldnn(), 324, 324),
        (types, 1, 100),
        (object(), 1, 100),
        (Plain, 1, 100),
        (BIG[:10], 40, 40),
        ([pa.table({"x": np.arange(1000)})], 8000, 8000),
    ],
)
def test_the_estimated_size_of_other_values_is_within_bounds(value: Any, low: int, high: int) -> None:
    assert low <= nbytes_of(value) <= high


def test_leaves_from_the_threshold_on_are_found_in_order() -> None:
    tensors = [torch.zeros(100 + i) for i in range(5)]
    value = {"a": tensors[0], "b": [tensors[1], (tensors[2],)], "c": tensors[3:]}
    found = large_leaves(value, tensors[1].nbytes)
    assert [len(leaf) for leaf in found] == [101, 102, 103, 104]


def test_leaves_of_tensordicts_are_found_and_lazy_stacks_are_not_stacked() -> None:
    tensordict = pytest.importorskip("tensordict")
    value = tensordict.TensorDict({"x": BIG, "in": {"y": torch.zeros(1000, 2)}}, batch_size=[1000])
    assert sorted(leaf.nbytes for leaf in large_leaves(value, 1)) == [4000, 8000]

    sent = [torch.zeros(100), torch.ones(100)]
    parts = [tensordict.TensorDict({"x": one}, batch_size=[]) for one in sent]
    found = large_leaves(tensordict.LazyStackedTensorDict(*parts), 1)
    assert [leaf is one for leaf, one in zip(found, sent, strict=True)] == [True] * 2


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(100).to_sparse(),
        lambda: torch.eye(100).to_sparse_csr(),
        lambda: torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2, 1000), (5, 1000)),
        lambda: torch.nested.nested_tensor([torch.ones(200), torch.ones(300)], layout=torch.jagged),
        lambda: np.zeros(300, dtype="i4,u1"),
        lambda: np.zeros((20, 20))[:, ::2],
        lambda: pa.table({"x": np.arange(1000)}),
        lambda: [[0.5] * 500, [str(n) for n in range(500)]],
    ],
    ids=["coo", "csr", "hybrid", "jagged", "structured", "strided", "table", "numbers and texts"],
)
def test_the_estimate_is_within_a_factor_of_three_of_the_encoded_size(make: Any) -> None:
    value = make()
    assert encode(value).nbytes / 3 <= nbytes_of(value) <= encode(value).nbytes * 3
