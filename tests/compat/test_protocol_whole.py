"""DataProto: united, padded, folded, converted, described."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from phalanx.compat.verl import protocol
from phalanx.compat.verl.protocol import (
    BatchData,
    DataProto,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)


def of(rows: int = 2, **meta: Any) -> DataProto:
    return DataProto.from_dict({"a": torch.arange(rows)}, {"b": [f"r{i}" for i in range(rows)]}, meta)


def column(*values: Any) -> dict[str, np.ndarray[Any, Any]]:
    held = np.empty(len(values), dtype=object)
    held[:] = values
    return {"a": held}


def test_union_adds_what_the_other_has_in_place() -> None:
    data = of(m=1)

    given = data.union(DataProto.from_dict({"c": torch.zeros(2)}, {"d": ["x", "y"]}, {"n": 2}))

    assert given is data
    assert (list(data.batch.keys()), list(data.non_tensor_batch), data.meta_info) == (
        ["a", "c"],
        ["b", "d"],
        {"m": 1, "n": 2},
    )


@pytest.mark.parametrize(
    "other",
    [
        DataProto.from_dict({"c": torch.zeros(2), "a": torch.tensor([5, 5])}),
        DataProto.from_dict({"c": torch.zeros(3)}),
        DataProto.from_dict({"c": torch.zeros(2)}, {"b": ["other", "values"]}),
        DataProto.from_dict({"c": torch.zeros(2)}, meta_info={"m": 2}),
        DataProto.from_dict(non_tensors={"d": ["x"]}),
    ],
    ids=["tensor", "rows", "column", "meta", "rows of a column"],
)
def test_a_union_that_is_refused_changes_nothing(other: DataProto) -> None:
    data = of(m=1)

    with pytest.raises(AssertionError):
        data.union(other)

    assert (list(data.batch.keys()), list(data.non_tensor_batch), data.meta_info) == (["a"], ["b"], {"m": 1})


def test_equal_values_on_both_sides_are_no_clash() -> None:
    assert len(of(m=1).union(of(m=1))) == 2


def test_a_union_with_a_batch_of_arrays_alone() -> None:
    data = of().union(DataProto.from_dict(non_tensors={"d": ["x", "y"]}))

    assert list(data.non_tensor_batch) == ["b", "d"]


def test_union_of_tensordicts_is_in_place() -> None:
    one = TensorDict({"a": torch.ones(2)}, [2])

    assert union_tensor_dict(one, TensorDict({"b": torch.ones(2)}, [2])) is one
    assert list(one.keys()) == ["a", "b"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: column(float("nan"), "x"),
        lambda: column([1, [2, float("nan")]], {"k": np.arange(3)}),
        lambda: column({"t": torch.ones(2)}, None),
        lambda: {"a": np.array([1.0, float("nan")])},
        lambda: {"a": np.array(["x", "y"])},
    ],
    ids=["nan", "nested", "tensors", "floats", "strings"],
)
def test_columns_with_equal_values_unite(make: Any) -> None:
    assert list(union_numpy_dict(make(), make())) == ["a"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (column(1), column(2)),
        (column(1), column(1.0)),
        (column([1]), column((1,))),
        (column(np.arange(2)), column(np.arange(1, 3))),
        (column(1, 2), column(1)),
        ({"a": np.arange(2)}, {"a": np.arange(2.0)}),
    ],
)
def test_columns_with_other_values_do_not(one: Any, other: Any) -> None:
    with pytest.raises(AssertionError, match=r"\['a'\], with other values"):
        union_numpy_dict(one, other)


def test_values_that_hold_themselves_can_be_compared() -> None:
    def cyclic() -> dict[str, np.ndarray[Any, Any]]:
        row: list[Any] = [1]
        row.append(row)
        return column(row)

    assert list(union_numpy_dict(cyclic(), cyclic())) == ["a"]


@pytest.mark.parametrize(("rows", "divisor", "added"), [(3, 2, 1), (2, 7, 5), (4, 2, 0), (0, 2, 0)])
def test_padding_repeats_the_first_rows(rows: int, divisor: int, added: int) -> None:
    padded, pad_size = pad_dataproto_to_divisor(of(rows), divisor)

    assert pad_size == added
    assert padded.batch["a"].tolist() == [i % rows for i in range(rows + added)]


def test_unpadding_gives_the_rows_back() -> None:
    assert unpad_dataproto(*pad_dataproto_to_divisor(of(3), 4)).batch["a"].tolist() == [0, 1, 2]


def test_the_batch_that_is_padded_is_not_changed() -> None:
    data = of(3)

    pad_dataproto_to_divisor(data, 2)

    assert len(data) == 3


@pytest.mark.parametrize(
    ("candidate", "rows"), [("", [0, 1, 1, 1]), ("last", [0, 1, 1, 1]), ("first", [0, 1, 0, 0])]
)
def test_padding_in_place_repeats_one_row(candidate: str, rows: list[int]) -> None:
    data = of(2)

    data.padding(2, candidate)

    assert data.batch["a"].tolist() == rows


def test_a_copy_can_be_padded_without_the_original() -> None:
    import copy

    data = of(2)

    copy.copy(data).padding(1)

    assert (len(data), len(data.non_tensor_batch["b"])) == (2, 2)


def test_folding_makes_rows_of_rows_and_leaves_the_batch_alone() -> None:
    data = of(6)

    folded = fold_batch_dim(data, 2)

    assert folded.batch["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert folded.non_tensor_batch["b"].shape == (2, 3)
    assert data.non_tensor_batch["b"].shape == (6,)


def test_unfolding_undoes_folding() -> None:
    again = unfold_batch_dim(fold_batch_dim(of(6), 2))

    assert again.batch["a"].tolist() == list(range(6))
    assert again.non_tensor_batch["b"].tolist() == of(6).non_tensor_batch["b"].tolist()


def test_folding_needs_whole_rows() -> None:
    with pytest.raises(AssertionError, match="6 rows cannot be folded into 4"):
        fold_batch_dim(of(6), 4)


def test_a_tensordict_holds_everything_and_gives_it_back() -> None:
    data = of(2, temperature=0.5, flags=["x"])

    again = DataProto.from_tensordict(data.to_tensordict())

    assert torch.equal(again.batch["a"], data.batch["a"])
    assert again.non_tensor_batch["b"].tolist() == ["r0", "r1"]
    assert again.meta_info == {"temperature": 0.5, "flags": ["x"]}


def test_a_batch_of_arrays_alone_survives_the_way_through_a_tensordict() -> None:
    data = DataProto.from_dict(non_tensors={"b": ["x", "y"]})

    again = DataProto.from_tensordict(data.to_tensordict())

    assert (again.batch, again.non_tensor_batch["b"].tolist()) == (None, ["x", "y"])


def test_what_is_in_a_batch_is_said_in_lines() -> None:
    data = DataProto.from_dict(
        {"a": torch.ones(2, 3)}, {"b": ["x", "y"]}, {"m": {"k": [1]}, "t": (1, "x"), "e": []}
    )

    assert data.get_data_info().splitlines() == [
        "batch",
        "  a: (2, 3) (torch.float32) cpu",
        "non_tensor_batch",
        "  b: ndarray(2,) (object)",
        "meta_info",
        "  m: dict[str: list[int]]",
        "  t: tuple(int, str)",
        "  e: list[...]",
    ]


def test_sizes_are_printed_in_gb(capsys: pytest.CaptureFixture[str]) -> None:
    DataProto.from_dict({"a": torch.zeros(1 << 20)}).print_size("batch")

    assert (
        capsys.readouterr().out
        == "batch, Size of tensordict: 0.00390625 GB, size of non_tensor_batch: 0.0 GB\n"
    )


def test_moving_to_a_device_by_index_stays_on_the_cpu_where_there_is_no_accelerator() -> None:
    data = of()

    assert data.to(protocol.get_device_id()) is data
    if not torch.cuda.is_available():
        assert data.batch["a"].device.type == "cpu"


@pytest.mark.parametrize(
    ("value", "chunkable", "concatable"),
    [
        (of(), True, False),
        (TensorDict({"a": torch.ones(2)}, [2]), True, False),
        ([of(), of()], False, True),
        ((of(), of()), False, True),
        ([], False, False),
        ([of(), 1], False, False),
        (3, False, False),
    ],
)
def test_what_can_be_cut_and_what_can_be_joined(value: Any, chunkable: bool, concatable: bool) -> None:
    assert (BatchData(value).is_chunkable(), BatchData(value).is_concatable()) == (chunkable, concatable)


def test_batch_data_cuts_and_joins() -> None:
    pieces = BatchData(of(4)).chunk(2)

    assert BatchData(pieces).concat().batch["a"].tolist() == [0, 1, 2, 3]


def test_batch_data_joins_tensordicts() -> None:
    pieces = BatchData(TensorDict({"a": torch.arange(4)}, [4])).chunk(2)

    assert BatchData(list(pieces)).concat()["a"].tolist() == [0, 1, 2, 3]


def test_nothing_cannot_be_joined() -> None:
    with pytest.raises(ValueError, match="an empty list"):
        BatchData([]).concat()


def test_the_padding_key_is_the_one_that_dispatch_functions_use() -> None:
    from phalanx.compat.verl.single_controller.base import dispatch_functions

    assert protocol._padding_size_key == dispatch_functions._padding_size_key
