"""`utils.tensordict_utils`: TensorDicts of tensors, nested tensors, objects by row and values of the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData, NonTensorStack

from phalanx.compat.verl.utils import tensordict_utils as tu


def ragged(*lengths: int) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)


def positions(*lengths: int) -> torch.Tensor:
    """Position ids of three kinds: rows of (3, length)."""
    return tu.nested_tensor_from_tensor_list(
        [torch.arange(3 * n).reshape(3, n) for n in lengths], ragged_idx=2
    )


def mixed(rows: int = 4) -> TensorDict:
    return tu.get_tensordict(
        {
            "obs": torch.arange(rows * 2).reshape(rows, 2),
            "ids": ragged(*range(1, rows + 1)),
            "names": [f"r{i}" for i in range(rows)],
        },
        {"temperature": 0.5, "flags": ["a", "b"]},
    )


def names(data: TensorDict) -> list[str]:
    return tu.get(data, "names")


def lengths(data: TensorDict, key: str = "ids") -> list[int]:
    return [row.shape[-1] for row in data[key].unbind()]


def test_lists_are_objects_by_row_and_values_are_of_the_whole_batch() -> None:
    data = mixed(2)

    assert isinstance(data.get("names"), NonTensorStack)
    assert isinstance(data.get("flags"), NonTensorData)
    assert (list(data.batch_size), names(data), tu.get(data, "flags")) == ([2], ["r0", "r1"], ["a", "b"])


@pytest.mark.parametrize(
    ("columns", "values", "message"),
    [
        ({"a": torch.ones(2), "b": torch.ones(3)}, {}, "is not consistent with other tensors"),
        ({"a": torch.ones(2), "b": ["x"]}, {}, "is not consistent with other tensors"),
        ({"a": 1}, {}, "isn't of 'torch.Tensor"),
        ({"a": [torch.ones(2)]}, {}, "doesn't support torch.Tensor"),
        ({"a": torch.ones(2)}, {"a": 1}, "both a column and a value"),
    ],
)
def test_what_makes_no_batch_is_refused(columns: Any, values: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        tu.get_tensordict(columns, values)


def test_rows_of_dicts_are_stacked_nested_or_kept_as_objects() -> None:
    data = tu.list_of_dict_to_tensordict(
        [
            {"even": torch.ones(2), "ragged": torch.ones(1), "text": "x"},
            {"even": torch.zeros(2), "ragged": torch.ones(3), "text": "y"},
        ]
    )

    assert data["even"].tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert (lengths(data, "ragged"), tu.get(data, "text")) == ([1, 3], ["x", "y"])


def test_assigning_lists_and_values() -> None:
    data = TensorDict({"a": torch.ones(2)}, [2])

    given = tu.assign_non_tensor(data, rows=["x", ["y"]], value={"k": 1})

    assert given is data
    assert (tu.get(data, "rows"), tu.get(data, "value")) == (["x", ["y"]], {"k": 1})


def test_a_list_can_be_a_value_of_the_whole_batch() -> None:
    data = TensorDict({"a": torch.ones(2)}, [2])

    tu.assign_non_tensor_data(data, "k", [1, 2, 3])

    assert tu.get(data, "k") == [1, 2, 3]


def test_objects_by_row_must_be_as_many_as_rows() -> None:
    with pytest.raises(AssertionError, match="1 objects for a batch of 2 rows"):
        tu.assign_non_tensor_stack(TensorDict({"a": torch.ones(2)}, [2]), "k", ["x"])


@pytest.mark.parametrize("function", [tu.assign_non_tensor_data, tu.assign_non_tensor_stack])
def test_only_tensordicts_are_assigned_to(function: Any) -> None:
    with pytest.raises(AssertionError, match="must be a TensorDict, but got a dict"):
        function({}, "k", [1])


def test_reading_gives_plain_values_and_a_default() -> None:
    data = mixed(2)

    assert (tu.get(data, "temperature"), tu.get(data, "nope"), tu.get(data, "nope", 5)) == (0.5, None, 5)
    assert (tu.get_non_tensor_data(data, "temperature", None), tu.get_non_tensor_data(data, "nope", 7)) == (
        0.5,
        7,
    )


def test_one_row_of_objects_can_be_unwrapped() -> None:
    assert tu.unwrap_non_tensor_data(mixed(2)[0].get("names")) == "r0"
    assert tu.unwrap_non_tensor_data([1]) == [1]


def test_get_keys_keeps_kinds_and_order() -> None:
    data = tu.get_keys(mixed(2), ["names", "temperature", "obs"])

    assert list(data.keys()) == ["names", "temperature", "obs"]
    assert (names(data), tu.get(data, "temperature")) == (["r0", "r1"], 0.5)


def test_pop_takes_out_one_key() -> None:
    data = mixed(2)

    assert (tu.pop(data, "names"), tu.pop(data, "nope", 1)) == (["r0", "r1"], 1)
    assert "names" not in data.keys()  # noqa: SIM118


def test_pop_keys_takes_out_all_or_none() -> None:
    data = mixed(2)

    with pytest.raises(KeyError, match="nope"):
        tu.pop_keys(data, ["obs", "nope"])
    taken = tu.pop_keys(data, ["obs", "names"])

    assert list(taken.keys()) == ["obs", "names"]
    assert list(data.keys()) == ["ids", "temperature", "flags"]


def test_chunks_are_equal_and_in_order() -> None:
    first, second = tu.chunk_tensordict(mixed(4), 2)

    assert (names(first), lengths(first)) == (["r0", "r1"], [1, 2])
    assert (names(second), lengths(second), tu.get(second, "temperature")) == (["r2", "r3"], [3, 4], 0.5)


def test_uneven_chunks_are_refused() -> None:
    with pytest.raises(AssertionError, match="got 4 and 3"):
        tu.chunk_tensordict(mixed(4), 3)


@pytest.mark.parametrize("indices", [[3, 0], torch.tensor([3, 0]), np.array([3, 0])])
def test_rows_are_chosen_by_number(indices: Any) -> None:
    data = tu.index_select_tensor_dict(mixed(4), indices)

    assert (names(data), lengths(data), data["obs"].tolist()) == (["r3", "r0"], [4, 1], [[6, 7], [0, 1]])


def test_rows_are_chosen_by_a_mask() -> None:
    assert names(tu.index_select_tensor_dict(mixed(3), torch.tensor([True, False, True]))) == ["r0", "r2"]


def test_rows_are_not_chosen_by_two_dims() -> None:
    with pytest.raises(AssertionError, match="indices must be a 1D tensor"):
        tu.index_select_tensor_dict(mixed(3), torch.tensor([[0, 1]]))


@given(st.integers(1, 6), st.integers(1, 6))
def test_concat_undoes_chunk(chunks: int, each: int) -> None:
    data = mixed(chunks * each)

    joined = tu.concat_tensordict(tu.chunk_tensordict(data, chunks))

    tu.assert_tensordict_eq(joined, data)


def test_values_of_the_whole_batch_are_those_of_the_first() -> None:
    parts = [tu.get_tensordict({"a": torch.ones(1)}, {"k": k}) for k in (1, 2)]

    assert tu.get(tu.concat_tensordict(parts), "k") == 1


def test_values_without_rows_are_joined_to_the_first() -> None:
    parts = [TensorDict({"k": NonTensorData(k)}, []) for k in (1, 2)]

    assert tu.get(tu.concat_tensordict_with_none_bsz(parts), "k") == 1
    assert tu.get(tu.concat_tensordict(parts), "k") == 1


def test_other_keys_cannot_be_joined() -> None:
    with pytest.raises(KeyError):
        tu.concat_tensordict([TensorDict({"a": torch.ones(1)}, [1]), TensorDict({"b": torch.ones(1)}, [1])])


def test_nested_tensors_are_joined_row_by_row() -> None:
    assert [len(row) for row in tu.concat_nested_tensors([ragged(1, 2), ragged(3)]).unbind()] == [1, 2, 3]


def test_nested_and_plain_tensors_are_not() -> None:
    with pytest.raises(AssertionError, match="only nested tensors"):
        tu.concat_nested_tensors([ragged(1), torch.ones(1)])


def test_position_ids_of_several_kinds_are_cut_chosen_and_joined() -> None:
    data = TensorDict({"p": positions(2, 4, 3, 1)}, [4])

    again = tu.concat_tensordict(list(tu.chunk_tensordict(data, 2)))

    assert lengths(again, "p") == [2, 4, 3, 1]
    assert lengths(tu.index_select_tensor_dict(data, [3, 1]), "p") == [1, 4]
    assert torch.equal(again["p"].unbind()[1], torch.arange(12).reshape(3, 4))


@pytest.mark.parametrize(
    "given",
    [
        [torch.arange(12).reshape(3, 4), torch.arange(12).reshape(3, 4)],
        [torch.arange(6).reshape(3, 2), torch.arange(12).reshape(3, 4)],
    ],
    ids=["one length", "two lengths"],
)
def test_position_ids_are_made_ragged_in_their_length(given: list[torch.Tensor]) -> None:
    data = TensorDict({"position_ids": torch.nested.as_nested_tensor(given, layout=torch.jagged)}, [2])

    tu.maybe_fix_3d_position_ids(data)

    assert data["position_ids"]._ragged_idx == 2
    assert all(torch.equal(a, b) for a, b in zip(data["position_ids"].unbind(), given, strict=True))


def test_other_position_ids_are_left_alone() -> None:
    data = TensorDict({"position_ids": ragged(2, 3)}, [2])

    tu.maybe_fix_3d_position_ids(data)

    assert data["position_ids"]._ragged_idx == 1


def test_union_adds_columns_and_refuses_other_values() -> None:
    data = mixed(2)

    assert (
        tu.union_tensor_dict(
            data, tu.get_tensordict({"more": ["p", "q"], "ids": ragged(1, 2)}, {"temperature": 0.5})
        )
        is data
    )
    assert tu.get(data, "more") == ["p", "q"]
    with pytest.raises(AssertionError, match="'names'"):
        tu.union_tensor_dict(data, tu.get_tensordict({"names": ["r0", "other"]}))


@pytest.mark.parametrize(
    ("rows", "divisor", "expected"), [(3, 2, [0, 1, 2, 0]), (2, 5, [0, 1, 0, 1, 0]), (4, 2, [0, 1, 2, 3])]
)
def test_padding_repeats_the_first_rows_and_is_undone(rows: int, divisor: int, expected: list[int]) -> None:
    padded, pad_size = tu.pad_to_divisor(mixed(rows), divisor)

    assert names(padded) == [f"r{i}" for i in expected]
    assert lengths(padded) == [i + 1 for i in expected]
    assert names(tu.unpad(padded, pad_size)) == [f"r{i}" for i in range(rows)]


def test_mini_batches_hold_every_row_once() -> None:
    parts = list(tu.make_iterator(mixed(4), 2, 1, seed=1, dataloader_kwargs={"shuffle": True}))

    assert sorted(name for part in parts for name in names(part)) == ["r0", "r1", "r2", "r3"]
    assert all(lengths(part) == [int(name[1:]) + 1 for name in names(part)] for part in parts)


def test_everything_becomes_contiguous_in_another_tensordict() -> None:
    data = TensorDict({"a": torch.arange(6).reshape(2, 3).t()}, [3])

    made = tu.contiguous(data)

    assert (made["a"].is_contiguous(), data["a"].is_contiguous()) == (True, False)


@pytest.mark.parametrize(
    "change",
    [
        {"obs": torch.zeros(2, 2)},
        {"obs": torch.arange(4)},
        {"ids": ragged(2, 1)},
        {"names": ["r0", "other"]},
        {"more": torch.ones(2)},
        {"obs": ["x", "y"]},
    ],
    ids=["content", "shape", "nested", "objects", "keys", "kinds"],
)
def test_tensordicts_that_differ_are_told_apart(change: dict[str, Any]) -> None:
    columns = {key: tu.get(mixed(2), key) for key in ("obs", "ids", "names")}

    tu.assert_tensordict_eq(tu.get_tensordict(columns), tu.get_tensordict(columns))
    with pytest.raises(AssertionError):
        tu.assert_tensordict_eq(tu.get_tensordict(columns), tu.get_tensordict({**columns, **change}))
