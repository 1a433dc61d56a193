"""DataProto: how it is made, and its rows: chosen, cut, joined, repeated, put in mini-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from phalanx.compat.verl.protocol import DataProto, DataProtoConfig, DataProtoItem, collate_fn
from phalanx.errors import DispatchError


def batch(rows: int = 6, **meta: Any) -> DataProto:
    return DataProto.from_dict(
        {"obs": torch.arange(rows * 2).reshape(rows, 2), "act": torch.arange(rows).float()},
        {"names": [f"r{i}" for i in range(rows)], "n": np.arange(rows)},
        {"task": "test", **meta},
    )


def rows_of(data: DataProto) -> list[str]:
    return data.non_tensor_batch["names"].tolist()


def ragged(*lengths: int) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)


def lengths_of(tensor: torch.Tensor) -> list[int]:
    return [len(row) for row in tensor.unbind()]


def test_a_list_becomes_a_column_of_objects() -> None:
    data = DataProto.from_dict({"a": torch.ones(2)}, {"b": [{"x": 1}, None]})

    assert data.non_tensor_batch["b"].dtype == object


def test_a_single_dict_is_sorted_into_tensors_and_arrays() -> None:
    data = DataProto.from_single_dict({"t": torch.ones(2), "a": np.array(["x", "y"])}, {"m": 1})

    assert (list(data.batch.keys()), list(data.non_tensor_batch), data.meta_info) == (["t"], ["a"], {"m": 1})


def test_a_single_dict_with_anything_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Unsupported type in data <class 'list'>, under 't'"):
        DataProto.from_single_dict({"t": [1, 2]})


@pytest.mark.parametrize("error", [AssertionError, DispatchError])
def test_rows_that_differ_are_refused_as_both_kinds_of_error(error: type[Exception]) -> None:
    with pytest.raises(error, match="same batch size with batch_dims=1"):
        DataProto.from_dict({"a": torch.ones(2), "b": torch.ones(3)})


def test_a_column_of_other_rows_is_refused() -> None:
    with pytest.raises(AssertionError, match="key b length 1 is not equal to batch size 2"):
        DataProto.from_dict({"a": torch.ones(2)}, {"b": ["x"]})


def test_a_batch_of_two_batch_dims_is_refused() -> None:
    with pytest.raises(AssertionError, match="num_batch_dims=1"):
        DataProto(TensorDict({"a": torch.ones(2, 3)}, [2, 3]))


@pytest.mark.parametrize("absent", [None, {}])
def test_a_batch_of_nothing_has_no_rows(absent: Any) -> None:
    data = DataProto(batch=None, non_tensor_batch=absent, meta_info={"k": 1})

    assert len(data) == 0
    assert data.non_tensor_batch == {}


def test_the_meta_info_that_is_given_is_not_changed() -> None:
    meta: dict[str, Any] = {}

    DataProto.from_dict({"a": torch.ones(2)}, meta_info=meta, auto_padding=True)

    assert meta == {}


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (DataProto(), 0),
        (DataProto(meta_info={"a": 1}), 0),
        (DataProto.from_dict(non_tensors={"a": ["x", "y"]}), 2),
        (DataProto.from_dict({"a": torch.ones(3)}), 3),
    ],
)
def test_length_is_the_number_of_rows(data: DataProto, length: int) -> None:
    assert len(data) == length


def test_an_int_gives_one_row_without_a_batch_dim() -> None:
    item = batch()[1]

    assert isinstance(item, DataProtoItem)
    assert (item.batch["obs"].tolist(), item.non_tensor_batch["names"]) == ([2, 3], "r1")


@pytest.mark.parametrize(
    "index",
    [
        slice(1, 4, 2),
        [1, 3],
        np.array([1, 3]),
        torch.tensor([1, 3]),
        [False, True, False, True, False, False],
        torch.tensor([0, 1, 0, 1, 0, 0]).bool(),
        [-5, -3],
    ],
)
def test_rows_are_chosen_by_slices_numbers_and_masks(index: Any) -> None:
    chosen = batch()[index]

    assert (rows_of(chosen), chosen.batch["act"].tolist()) == (["r1", "r3"], [1.0, 3.0])


@pytest.mark.parametrize("index", ["obs", None, 1.5, (0, 1)])
def test_any_other_index_is_a_type_error(index: Any) -> None:
    with pytest.raises(TypeError, match="indexed by an int"):
        batch()[index]


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(AssertionError, match="2 booleans was given for 6 rows"):
        batch().select_idxs([True, False])


def test_slices_are_views_and_have_meta_info_of_their_own() -> None:
    data = batch()

    part = data[0:2]
    part.batch["act"][0] = 9.0
    part.meta_info["task"] = "other"

    assert (data.batch["act"][0].item(), data.meta_info["task"]) == (9.0, "test")


def test_nested_tensors_are_rows_like_others() -> None:
    data = DataProto(TensorDict({"ids": ragged(1, 2, 3, 4), "n": torch.arange(4)}, [4]))

    assert lengths_of(data[1:3].batch["ids"]) == [2, 3]
    assert lengths_of(data[[3, 0, 0]].batch["ids"]) == [4, 1, 1]
    assert lengths_of(DataProto.concat([data[2:], data[:1]]).batch["ids"]) == [3, 4, 1]


def test_select_takes_keys_and_shares_no_dict() -> None:
    data = batch(2, extra=1)

    chosen = data.select(["act"], ["names"], ["extra"])
    chosen.non_tensor_batch["more"] = np.zeros(2)

    assert (list(chosen.batch.keys()), chosen.meta_info) == (["act"], {"extra": 1})
    assert "more" not in data.non_tensor_batch


def test_a_deep_copy_shares_no_memory() -> None:
    data = batch(2)

    copied = data.select(deepcopy=True)

    assert copied.batch["obs"].data_ptr() != data.batch["obs"].data_ptr()


def test_selecting_an_unknown_tensor_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        batch().select(["nope"])


def test_pop_moves_keys_into_another_batch() -> None:
    data = batch(2, extra=1)

    taken = data.pop(["obs"], ["n"], ["extra"])

    assert (list(taken.batch.keys()), list(taken.non_tensor_batch), taken.meta_info) == (
        ["obs"],
        ["n"],
        {"extra": 1},
    )
    assert (list(data.batch.keys()), list(data.non_tensor_batch), data.meta_info) == (
        ["act"],
        ["names"],
        {"task": "test"},
    )


def test_popping_an_unknown_key_takes_nothing() -> None:
    data = batch(2)

    with pytest.raises(AssertionError, match="nope"):
        data.pop(["obs"], ["nope"])

    assert "obs" in data.batch.keys()  # noqa: SIM118


def test_rename_changes_several_keys_at_once() -> None:
    data = batch(2)
    acts = data.batch["act"]

    given = data.rename(["obs", "act"], ["act", "obs"])

    assert given is data
    assert data.batch["obs"] is acts


@pytest.mark.parametrize(
    ("old", "new", "error"), [("nope", "a", KeyError), (["obs"], ["a", "b"], ValueError), (1, "a", TypeError)]
)
def test_what_cannot_be_renamed(old: Any, new: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        batch(2).rename(old, new)


@given(st.integers(1, 12), st.integers(1, 12))
def test_chunks_with_padding_enabled_hold_all_rows_in_order(rows: int, chunks: int) -> None:
    data = DataProto.from_dict({"a": torch.arange(rows)}, auto_padding=True)

    pieces = data.chunk(chunks)

    assert len(pieces) == chunks
    assert [row for piece in pieces for row in piece.batch["a"].tolist()] == list(range(rows))


def test_uneven_chunks_are_refused_without_padding() -> None:
    with pytest.raises(AssertionError, match="only support equal chunk"):
        batch(6).chunk(4)


def test_chunks_of_arrays_alone() -> None:
    data = DataProto.from_dict(non_tensors={"names": ["a", "b", "c", "d"]})

    assert [rows_of(piece) for piece in data.chunk(2)] == [["a", "b"], ["c", "d"]]


def test_split_leaves_the_rest_to_the_last_piece() -> None:
    assert [len(piece) for piece in batch(6).split(4)] == [4, 2]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_concat_undoes_any_cut(sizes: list[int]) -> None:
    data = batch(sum(sizes))
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]

    joined = DataProto.concat([data[stop - size : stop] for stop, size in zip(stops, sizes, strict=True)])

    assert torch.equal(joined.batch["obs"], data.batch["obs"])
    assert (rows_of(joined), joined.meta_info) == (rows_of(data), data.meta_info)


def test_metrics_are_joined_as_lists() -> None:
    parts = [batch(1, metrics={"loss": 1.0}), batch(1, metrics=[{"loss": 2.0}, {"loss": 3.0}])]

    assert DataProto.concat(parts).meta_info["metrics"] == {"loss": [1.0, 2.0, 3.0]}


def test_meta_info_that_differs_cannot_be_joined() -> None:
    with pytest.raises(AssertionError, match="'k'"):
        DataProto.concat([batch(1, k=1), batch(1, k=2)])


def test_meta_info_that_is_an_array_can_be_joined_where_equal() -> None:
    joined = DataProto.concat([batch(1, k=np.ones(2)), batch(1, k=np.ones(2))])

    assert joined.meta_info["k"].tolist() == [1.0, 1.0]


def test_tensors_that_only_some_have_are_not_dropped() -> None:
    with pytest.raises(AssertionError, match="1 of 2 batches have no tensors"):
        DataProto.concat([DataProto.from_dict(non_tensors={"names": ["a"], "n": [1]}), batch(1)])


def test_repeat_in_a_row_and_over_again() -> None:
    assert rows_of(batch(2).repeat(2)) == ["r0", "r0", "r1", "r1"]
    assert rows_of(batch(2).repeat(2, interleave=False)) == ["r0", "r1", "r0", "r1"]


@pytest.mark.parametrize("times", [[2, 1], (2, 1), np.array([2, 1]), torch.tensor([2, 1])])
def test_each_row_its_own_number_of_times(times: Any) -> None:
    assert rows_of(batch(2).sample_level_repeat(times)) == ["r0", "r0", "r1"]


def test_repeat_times_need_one_number_per_row() -> None:
    with pytest.raises(AssertionError, match="one number for each of the 2 rows"):
        batch(2).sample_level_repeat([1])


def test_reorder_is_in_place() -> None:
    data = batch(3)

    assert data.reorder(torch.tensor([2, 0, 1])) is None
    assert rows_of(data) == ["r2", "r0", "r1"]


def test_columns_are_dealt_out_over_rows_and_others_repeated() -> None:
    data = batch(2).unfold_column_chunks(2, split_keys=["obs"])

    assert data.batch["obs"].tolist() == [[0], [1], [2], [3]]
    assert rows_of(data) == ["r0", "r0", "r1", "r1"]


def test_mini_batches_hold_every_row_once_per_epoch() -> None:
    parts = list(batch(6).make_iterator(2, epochs=2, seed=3, dataloader_kwargs={"shuffle": True}))

    assert [len(part) for part in parts] == [2] * 6
    assert sorted(row for part in parts[:3] for row in rows_of(part)) == rows_of(batch(6))
    assert parts[0].meta_info == {"task": "test"}


def test_a_seed_gives_the_same_order_and_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()

    orders = [
        [rows_of(part) for part in batch(6).make_iterator(2, 1, seed=3, dataloader_kwargs={"shuffle": True})]
        for _ in range(2)
    ]

    assert orders[0] == orders[1]
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_that_do_not_fill_mini_batches_are_refused_before_the_first() -> None:
    with pytest.raises(AssertionError, match="6 % 4 != 0"):
        batch(6).make_iterator(4, 1)


def test_items_are_collated_into_a_batch() -> None:
    data = batch(3)

    made = collate_fn([data[2], data[0]])

    assert (rows_of(made), made.batch["act"].tolist()) == (["r2", "r0"], [2.0, 0.0])


def test_auto_padding_is_told_by_the_batch_itself() -> None:
    own = DataProto.from_dict({"a": torch.ones(1)}, auto_padding=True)

    assert (own.is_padding_enabled(), batch(1).is_padding_enabled()) == (True, False)


@pytest.mark.parametrize(("value", "enabled"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_auto_padding_by_the_environment(value: str, enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_AUTO_PADDING", value)

    assert batch(1).is_padding_enabled() is enabled


def test_auto_padding_of_all_batches_by_a_switch() -> None:
    DataProtoConfig.auto_padding = True
    try:
        assert batch(1).is_padding_enabled()
    finally:
        DataProtoConfig.auto_padding = False


def test_the_switch_takes_only_booleans() -> None:
    with pytest.raises(AssertionError, match="True or False"):
        DataProtoConfig.auto_padding = 1  # pyright: ignore[reportAttributeAccessIssue]
