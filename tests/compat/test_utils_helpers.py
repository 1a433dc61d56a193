"""The smaller helpers: dicts, environment, growing enumerations, devices, event loops, balanced rows."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from phalanx.compat.verl.utils import device, py_functional, ray_utils, transferqueue_utils
from phalanx.compat.verl.utils.py_functional import DynamicEnum
from phalanx.compat.verl.utils.seqlen_balancing import (
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    log_seqlen_unbalance,
    rearrange_micro_batches,
    restore_dynamic_batch,
)


class Colour(DynamicEnum):
    """At the top of a module, so that members can be pickled."""

    _registry: dict[str, Any] = {}
    _next_value = 0


RED = Colour.register("red")
BLUE = Colour.register("BLUE")


def test_a_union_of_dicts_is_in_place() -> None:
    data: dict[str, Any] = {"a": [1]}

    assert py_functional.union_two_dict(data, {"a": [1], "b": 2}) is data
    assert data == {"a": [1], "b": 2}


def test_a_union_that_is_refused_changes_nothing() -> None:
    data = {"a": 1}

    with pytest.raises(AssertionError, match="1 on one side of a union and 2"):
        py_functional.union_two_dict(data, {"b": 2, "a": 2})

    assert data == {"a": 1}


def test_values_are_appended_and_lists_extended() -> None:
    data: dict[str, Any] = {}

    py_functional.append_to_dict(data, {"loss": 1.0, "norm": [2.0, 3.0]}, prefix="actor/")
    py_functional.append_to_dict(data, {"loss": 4.0}, prefix="actor/")

    assert data == {"actor/loss": [1.0, 4.0], "actor/norm": [2.0, 3.0]}


def test_a_list_of_dicts_becomes_a_dict_of_lists() -> None:
    assert py_functional.list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, {"a": 3}]) == {"a": [1, 3], "b": [2]}
    assert py_functional.list_of_dict_to_dict_of_list([]) == {}


def test_keys_that_the_first_dict_lacks_are_refused() -> None:
    with pytest.raises(AssertionError, match="Key 'b' is not present"):
        py_functional.list_of_dict_to_dict_of_list([{"a": 1}, {"b": 2}])


@pytest.mark.parametrize("before", [None, "old"])
def test_a_variable_is_as_before_after_the_block(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PX_TEST_VARIABLE", raising=False)
    if before is not None:
        monkeypatch.setenv("PX_TEST_VARIABLE", before)

    with pytest.raises(KeyError), py_functional.temp_env_var("PX_TEST_VARIABLE", "new"):
        assert os.environ["PX_TEST_VARIABLE"] == "new"
        raise KeyError

    assert os.environ.get("PX_TEST_VARIABLE") == before


def test_configurations_become_plain_dicts_and_lists() -> None:
    omegaconf = pytest.importorskip("omegaconf")

    made = py_functional.convert_to_regular_types({"c": omegaconf.OmegaConf.create({"a": [1, {"b": 2}]})})

    assert (made, type(made["c"]["a"][1])) == ({"c": {"a": [1, {"b": 2}]}}, dict)


def test_members_are_found_by_attribute_name_and_iteration() -> None:
    assert (RED.name, RED.value, BLUE.value) == ("RED", 0, 1)
    assert Colour["RED"] is Colour.from_name("red") is RED
    assert list(Colour)[:2] == Colour.values()[:2] == [RED, BLUE]
    assert Colour.names()[:2] == ["RED", "BLUE"]
    assert getattr(Colour, "BLUE") is BLUE  # noqa: B009 - an attribute that type checkers do not see


def test_membership_is_by_name_or_by_member() -> None:
    assert RED in Colour
    assert "RED" in Colour
    assert 0 not in Colour


def test_a_member_is_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(RED)) is RED


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="RED already registered"):
        Colour.register("Red")


def test_a_removed_member_is_gone_and_its_value_is_not_used_again() -> None:
    green = Colour.register("green")

    assert Colour.remove("GREEN") is green
    assert (Colour.from_name("green"), hasattr(Colour, "GREEN")) == (None, False)
    again = Colour.register("yellow")
    assert (Colour.remove("yellow") is again, again.value) == (True, green.value + 1)


@pytest.mark.skipif(device.is_device_available(), reason="says what is true without an accelerator")
def test_a_machine_without_accelerators_computes_on_its_cpu() -> None:
    assert (device.get_device_name(), device.get_device_id(), device.get_nccl_backend()) == ("cpu", 0, "gloo")
    assert not device.is_cuda_available
    assert not device.is_npu_available


@pytest.mark.skipif(device.is_device_available(), reason="says what is true without an accelerator")
def test_logical_accelerators_of_ray_do_not_make_it_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")

    assert (device.get_device_name(), device.get_resource_name()) == ("cpu", "GPU")
    assert device.get_visible_devices_keyword() == "CUDA_VISIBLE_DEVICES"


@pytest.mark.skipif(device.is_device_available(), reason="says what is true without an accelerator")
def test_memory_functions_of_the_device_can_be_called_on_a_cpu() -> None:
    namespace = device.get_torch_device()
    namespace.empty_cache()
    namespace.synchronize()

    assert (namespace.memory_allocated(), namespace.max_memory_reserved()) == (0, 0)


def test_seeds_of_the_device_make_numbers_repeat() -> None:
    drawn = []
    for _ in range(2):
        device.manual_seed_all(3)
        drawn.append(torch.rand(1, device=device.torch_device_of(device.get_device_id())).item())

    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}, True),
        ({"RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES": "1"}, True),
        ({"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": ""}, False),
        ({"CUDA_VISIBLE_DEVICES": "0"}, False),
    ],
)
def test_whether_ray_leaves_masks_alone(env: dict[str, str], told: bool) -> None:
    assert ray_utils.ray_noset_visible_devices(env) is told


def test_putting_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match="data_list must not be empty"):
        ray_utils.parallel_put([])


def test_a_coroutine_function_can_be_called_without_a_loop_and_awaited_in_one() -> None:
    @ray_utils.auto_await
    async def doubled(x: int) -> int:
        await asyncio.sleep(0)
        return 2 * x

    async def inside() -> int:
        return await doubled(4)

    assert (doubled(3), asyncio.run(inside()), doubled.__name__) == (6, 8, "doubled")


def test_a_plain_function_stays_one() -> None:
    assert ray_utils.auto_await(lambda x: 3 * x)(3) == 9


def test_the_event_loop_is_made_once_and_is_the_running_one_inside() -> None:
    before = asyncio.new_event_loop()
    asyncio.set_event_loop(before)
    before.close()

    async def running() -> bool:
        return ray_utils.get_event_loop() is asyncio.get_running_loop()

    made = ray_utils.get_event_loop()
    try:
        assert (made is ray_utils.get_event_loop(), made.is_closed(), made.run_until_complete(running())) == (
            True,
            False,
            True,
        )
    finally:
        made.close()
        asyncio.set_event_loop(None)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.integers(1, 6), st.booleans())
def test_every_row_is_in_one_part_and_no_part_is_empty(lengths: list[int], parts: int, equal: bool) -> None:
    lengths = lengths * parts

    found = get_seqlen_balanced_partitions(lengths, parts, equal_size=equal)

    assert sorted(row for part in found for row in part) == list(range(len(lengths)))
    assert len(found) == parts
    assert all(found)
    if equal:
        assert len({len(part) for part in found}) == 1


def test_parts_have_about_the_same_length() -> None:
    lengths = [8, 7, 6, 5, 4, 3, 2, 1]

    found = get_seqlen_balanced_partitions(lengths, 4, equal_size=True)

    assert [sum(lengths[row] for row in part) for part in found] == [9, 9, 9, 9]


@pytest.mark.parametrize(("rows", "parts", "equal"), [(2, 3, False), (3, 2, True), (3, 0, False)])
def test_rows_that_do_not_fill_the_parts_are_refused(rows: int, parts: int, equal: bool) -> None:
    with pytest.raises(AssertionError, match=rf"items:\[{rows}\]|{rows} % {parts} != 0"):
        get_seqlen_balanced_partitions([1] * rows, parts, equal_size=equal)


def masked(lengths: list[int]) -> TensorDict:
    mask = (torch.arange(8)[None] < torch.tensor(lengths)[:, None]).long()
    return TensorDict({"attention_mask": mask, "row": torch.arange(len(lengths))}, [len(lengths)])


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=12),
    st.integers(8, 40),
    st.integers(1, 2),
    st.booleans(),
)
def test_micro_batches_keep_the_limit_and_come_back_in_order(
    lengths: list[int], most: int, multiple: int, balance: bool
) -> None:
    lengths = lengths * multiple

    parts, rows = rearrange_micro_batches(
        masked(lengths), most, num_batches_divided_by=multiple, use_dynamic_bsz_balance=balance
    )

    assert len(parts) % multiple == 0
    assert all(int(part["attention_mask"].sum()) <= most for part in parts)
    outputs = torch.cat([part["row"] for part in parts])
    assert restore_dynamic_batch(outputs, rows).tolist() == list(range(len(lengths)))


def test_rows_of_a_group_stay_in_one_micro_batch() -> None:
    _, rows = rearrange_micro_batches(masked([8, 1, 5, 3, 2, 7]), 12, force_group_size=2)

    assert sorted(rows) == [[0, 1], [2, 3], [4, 5]]


def test_jagged_rows_are_cut_by_their_lengths() -> None:
    jagged = torch.nested.as_nested_tensor([torch.arange(n) for n in (3, 1, 2)], layout=torch.jagged)

    _, rows = rearrange_micro_batches(TensorDict({"input_ids": jagged}, [3]), 4)

    assert sorted(row for part in rows for row in part) == [0, 1, 2]
    assert len(rows) == 2


@pytest.mark.parametrize(("most", "options"), [(7, {}), (8, {"min_num_micro_batch": 4})])
def test_micro_batches_that_cannot_be_had_are_refused(most: int, options: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, ValueError), match="max_token_len"):
        rearrange_micro_batches(masked([8, 1, 5]), most, **options)


@pytest.mark.parametrize("elsewhere", [[[9, -2]], [[8, -1]]], ids=["too long a row", "too few rows"])
def test_rows_that_another_rank_cannot_cut_are_refused_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, elsewhere: list[list[int]]
) -> None:
    def all_reduce(held: torch.Tensor, op: Any, group: Any) -> None:
        held.copy_(held.maximum(torch.tensor(elsewhere.pop(0) if elsewhere else held.tolist())))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)

    with pytest.raises(ValueError, match="max_token_len"):
        rearrange_micro_batches(masked([8, 8]), 8, dp_group=object())


def test_unbalance_is_told_before_and_after() -> None:
    told = log_seqlen_unbalance([8, 1, 5, 3], [[0], [1, 2, 3]], "lengths")

    assert (told["lengths/max"], told["lengths/balanced_max"], told["lengths/mean"]) == (9, 9, 8.5)
    assert get_reverse_idx([2, 0, 1]) == [1, 2, 0]


def test_bridged_methods_are_called_as_they_are() -> None:
    @transferqueue_utils.tqbridge()
    def plus(x: int) -> int:
        return x + 1

    @transferqueue_utils.tqbridge(dispatch_mode=None)
    async def later(x: int) -> int:
        return x + 2

    assert (plus(1), asyncio.run(later(1)), plus.__name__) == (2, 3, "plus")


@pytest.mark.parametrize("kind", [transferqueue_utils.BatchMeta, transferqueue_utils.KVBatchMeta])
def test_metadata_that_only_stand_for_rows_are_refused(kind: Any) -> None:
    @transferqueue_utils.tqbridge()
    def rows(data: Any) -> int:
        return len(data)

    with pytest.raises(AssertionError, match="transfer_queue is not installed here"):
        rows(kind.__new__(kind))


@pytest.mark.slow
def test_the_protocol_loads_no_ray() -> None:
    code = "import sys, phalanx.compat.verl.protocol; print('ray' in sys.modules)"

    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ran.stdout.strip() == "False"
