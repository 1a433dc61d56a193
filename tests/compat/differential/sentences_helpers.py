"""What the helpers in `utils` refuse, in verl's own words."""

from __future__ import annotations

from typing import Any

import torch
from plain import load
from sentence import Sentence
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData, NonTensorStack

balancing = load("utils.seqlen_balancing")
functional = load("utils.py_functional")
helpers = load("utils.tensordict_utils")
ray_utils = load("utils.ray_utils")


def tensors(count: int, start: int = 0) -> TensorDict:
    return TensorDict({"obs": torch.arange(start, start + count)}, [count])


def mixed(count: int, name: str = "x") -> Any:
    return helpers.get_tensordict({"obs": torch.arange(count)}, {"name": name})


def stack(*values: str) -> Any:
    return NonTensorStack.from_list([NonTensorData(value) for value in values])


def jagged(*lengths: int) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.ones(length, 2) for length in lengths], layout=torch.jagged)


def ragged(*lengths: int, start: int = 0, more: bool = False) -> TensorDict:
    rows = [torch.arange(start, start + length) for length in lengths]
    ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return TensorDict({"ids": ids, "more": ids.clone()} if more else {"ids": ids}, [len(lengths)])


def masked(count: int, length: int) -> TensorDict:
    ids = torch.ones(count, length, dtype=torch.int64)
    return TensorDict({"input_ids": ids, "attention_mask": ids.clone()}, [count])


SENTENCES = [
    Sentence(
        "utils.tensordict_utils:assign_non_tensor_data",
        lambda: helpers.assign_non_tensor_data({}, "a", 1),
        AssertionError,
        "input dict must be a TensorDict",
    ),
    Sentence(
        "utils.tensordict_utils:assign_non_tensor_stack",
        lambda: helpers.assign_non_tensor_stack({}, "a", [1]),
        AssertionError,
        "input dict must be a TensorDict",
    ),
    Sentence(
        "utils.tensordict_utils:assign_non_tensor",
        lambda: helpers.assign_non_tensor({}, a=1),
        AssertionError,
        "input dict must be a TensorDict",
    ),
    Sentence(
        "utils.tensordict_utils:nested_tensor_from_tensor_list",
        lambda: helpers.nested_tensor_from_tensor_list([]),
        AssertionError,
        "Must provide at least one tensor",
    ),
    Sentence(
        "utils.tensordict_utils:nested_tensor_from_tensor_list",
        lambda: helpers.nested_tensor_from_tensor_list([torch.ones(2, 3)], ragged_idx=3),
        AssertionError,
        "ragged_idx must be in [1, 2]. Got ragged_idx=3 and sample_dim=2",
    ),
    Sentence(
        "utils.tensordict_utils:nested_tensor_from_tensor_list",
        lambda: helpers.nested_tensor_from_tensor_list([torch.ones(2, 3)], ragged_idx=0),
        AssertionError,
        "ragged_idx must be in [1, 2]. Got ragged_idx=0 and sample_dim=2",
    ),
    Sentence(
        "utils.tensordict_utils:concat_tensordict",
        lambda: helpers.concat_tensordict([]),
        AssertionError,
        "Must have at least one tensordict",
    ),
    Sentence(
        "utils.tensordict_utils:concat_tensordict",
        lambda: helpers.concat_tensordict([ragged(1, 2), tensors(2)]),
        AssertionError,
        "All tensordicts must have the same set of nested tensors.",
    ),
    Sentence(
        "utils.tensordict_utils:concat_tensordict",
        lambda: helpers.concat_tensordict([ragged(1, 2), ragged(1, 2, more=True)]),
        AssertionError,
        "All tensordicts must have the same set of nested tensors.",
    ),
    Sentence(
        "utils.tensordict_utils:chunk_tensordict",
        lambda: helpers.chunk_tensordict(tensors(4), 3),
        AssertionError,
        "expecting td with length divisible by chunks, but got 4 and 3",
    ),
    Sentence(
        "utils.tensordict_utils:chunk_tensordict",
        lambda: helpers.chunk_tensordict([1, 2, 3], 3),
        AssertionError,
        "expecting td with length divisible by chunks, but got 3 and 3",
    ),
    Sentence(
        "utils.tensordict_utils:get_tensordict",
        lambda: helpers.get_tensordict({"a": jagged(2, 3).transpose(1, 2)}),
        AssertionError,
        "Nested tensors must be contiguous. Try setting layout=torch.jagged",
    ),
    Sentence(
        "utils.tensordict_utils:get_tensordict",
        lambda: helpers.get_tensordict({"a": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])}),
        AssertionError,
        "Nested tensors must be jagged.",
    ),
    Sentence(
        "utils.tensordict_utils:get_tensordict",
        lambda: helpers.get_tensordict({"a": torch.ones(3), "b": stack("x", "y")}),
        AssertionError,
        "Batch size of NonTensorStack b is not consistent with other tensors. Expected 3, got 2",
    ),
    Sentence(
        "utils.tensordict_utils:get_tensordict",
        lambda: helpers.get_tensordict({"a": [torch.ones(1), torch.ones(2)]}),
        AssertionError,
        "Passing a list makes the data NonTensorStack, which doesn't support torch.Tensor. Please"
        " convert to numpy first",
    ),
    Sentence(
        "utils.tensordict_utils:get_tensordict",
        lambda: helpers.get_tensordict({"a": 5}),
        AssertionError,
        "a -> <class 'int'> isn't of 'torch.Tensor | list | np.ndarray' type",
    ),
    Sentence(
        "utils.tensordict_utils:get_tensordict",
        lambda: helpers.get_tensordict({"a": torch.ones(2), "b": torch.ones(3)}),
        AssertionError,
        "Batch size of tensor b is not consistent with other tensors. Expected 2, got 3",
    ),
    Sentence(
        "utils.tensordict_utils:get_tensordict",
        lambda: helpers.get_tensordict({"a": torch.ones(2), "b": ["x"]}),
        AssertionError,
        "Batch size of tensor b is not consistent with other tensors. Expected 2, got 1",
    ),
    Sentence(
        "utils.tensordict_utils:index_select_tensor_dict",
        lambda: helpers.index_select_tensor_dict(tensors(2), [[0], [1]]),
        AssertionError,
        "indices must be a 1D tensor",
    ),
    Sentence(
        "utils.tensordict_utils:union_tensor_dict",
        lambda: helpers.union_tensor_dict(tensors(2), tensors(3)),
        AssertionError,
        "Two tensor dict must have identical batch size. Got torch.Size([2]) and torch.Size([3])",
    ),
    Sentence(
        "utils.tensordict_utils:union_tensor_dict",
        lambda: helpers.union_tensor_dict(tensors(2), tensors(2, start=5)),
        AssertionError,
        "obs in tensor_dict1 and tensor_dict2 are not the same object",
    ),
    Sentence(
        "utils.tensordict_utils:union_tensor_dict",
        lambda: helpers.union_tensor_dict(mixed(2), mixed(2, name="z")),
        AssertionError,
        "name in tensor_dict1 and tensor_dict2 are not the same object",
    ),
    Sentence(
        "utils.tensordict_utils:make_iterator",
        lambda: helpers.make_iterator(tensors(6), 4, 1),
        AssertionError,
        "6 % 4 != 0",
    ),
    Sentence(
        "utils.tensordict_utils:assert_tensordict_eq",
        lambda: helpers.assert_tensordict_eq(tensors(2), TensorDict({"seen": torch.arange(2)}, [2])),
        AssertionError,
        "key set diffs. Got tensordict2_key_set={'seen'} vs tensordict1_key_set={'obs'}",
    ),
    Sentence(
        "utils.tensordict_utils:assert_tensordict_eq",
        lambda: helpers.assert_tensordict_eq(
            helpers.get_tensordict({}, {"a": 1}), helpers.get_tensordict({}, {"a": "x"})
        ),
        AssertionError,
        "The type of a must be the same. Got <class 'int'> vs <class 'str'>",
    ),
    Sentence(
        "utils.tensordict_utils:assert_tensordict_eq",
        lambda: helpers.assert_tensordict_eq(ragged(1, 2), TensorDict({"ids": torch.ones(2, 2)}, [2])),
        AssertionError,
        "The type of ids must be the same. Got <class "
        "'torch.nested._internal.nested_tensor.NestedTensor'> vs <class 'torch.Tensor'>",
    ),
    Sentence(
        "utils.tensordict_utils:assert_tensordict_eq",
        lambda: helpers.assert_tensordict_eq(
            TensorDict({"ids": torch.nested.nested_tensor([torch.ones(1)])}, [1]),
            TensorDict({"ids": torch.ones(1, 2)}, [1]),
        ),
        AssertionError,
        "Both tensors must be nested tensors. val.is_nested=True, val2.is_nested=False",
    ),
    Sentence(
        "utils.tensordict_utils:assert_tensordict_eq",
        lambda: helpers.assert_tensordict_eq(
            TensorDict({"ids": jagged(1, 2)}, []), TensorDict({"ids": jagged(1, 2, 3)}, [])
        ),
        AssertionError,
        "Nested tensor should have the same lengths. len(t1)=2 vs len(t2)=3",
    ),
    Sentence(
        "utils.tensordict_utils:assert_tensordict_eq",
        lambda: helpers.assert_tensordict_eq(ragged(1, 2), ragged(1, 2, start=3)),
        AssertionError,
        "Nested tensor components have different values. c1=tensor([0]) vs c2=tensor([3])",
    ),
    Sentence(
        "utils.tensordict_utils:get_keys",
        lambda: helpers.get_keys(tensors(2), ["obs", "nope"]),
        KeyError,
        "key nope not in tensordict",
    ),
    Sentence(
        "utils.tensordict_utils:pop_keys",
        lambda: helpers.pop_keys(tensors(2), ["nope"]),
        KeyError,
        "key nope not in tensordict",
    ),
    Sentence(
        "utils.tensordict_utils:pad_to_divisor",
        lambda: helpers.pad_to_divisor([1], 2),
        AssertionError,
        "data must be a TensorDict",
    ),
    Sentence(
        "utils.tensordict_utils:contiguous",
        lambda: helpers.contiguous(TensorDict({"a": tensors(2)}, [2])),
        AssertionError,
        "Expect val to be a torch.Tensor. Got <class 'tensordict._td.TensorDict'>",
    ),
    Sentence(
        "utils.py_functional:union_two_dict",
        lambda: functional.union_two_dict({"key": 1}, {"key": 2}),
        AssertionError,
        "key in meta_dict1 and meta_dict2 are not the same object",
    ),
    Sentence(
        "utils.py_functional:list_of_dict_to_dict_of_list",
        lambda: functional.list_of_dict_to_dict_of_list([{"a": 1}, {"b": 1}]),
        AssertionError,
        "Key 'b' is not present in the keys of the first dictionary in the list.",
    ),
    Sentence(
        "utils.seqlen_balancing:get_seqlen_balanced_partitions",
        lambda: balancing.get_seqlen_balanced_partitions([1, 2], 3, equal_size=False),
        AssertionError,
        "number of items:[2] < k_partitions:[3]",
    ),
    Sentence(
        "utils.seqlen_balancing:karmarkar_karp",
        lambda: balancing.get_seqlen_balanced_partitions([1, 2, 3], 2, equal_size=True),
        AssertionError,
        "3 % 2 != 0",
    ),
    Sentence(
        "utils.seqlen_balancing:karmarkar_karp",
        lambda: balancing.karmarkar_karp([1, 2, 3], 2, equal_size=True),
        AssertionError,
        "3 % 2 != 0",
    ),
    Sentence(
        "utils.seqlen_balancing:rearrange_micro_batches",
        lambda: balancing.rearrange_micro_batches(masked(2, length=4), max_token_len=3),
        AssertionError,
        "max_token_len must be greater than the sequence length. Got max_token_len=3 and max_seq_len=4",
    ),
    Sentence(
        "utils.seqlen_balancing:rearrange_micro_batches",
        lambda: balancing.rearrange_micro_batches(masked(3, length=4), 8, force_group_size=2),
        AssertionError,
        "Batch size 3 must be divisible by force_group_size 2",
    ),
    Sentence(
        "utils.seqlen_balancing:rearrange_micro_batches",
        lambda: balancing.rearrange_micro_batches(masked(4, length=4), 5, force_group_size=2),
        ValueError,
        "A forced group exceeds max_token_len and cannot be split. Got max_group_token_len=8 and "
        "max_token_len=5.",
    ),
    Sentence(
        "utils.seqlen_balancing:rearrange_micro_batches",
        lambda: balancing.rearrange_micro_batches(masked(2, length=4), 8, min_num_micro_batch=3),
        ValueError,
        "Cannot satisfy max_token_len while keeping forced groups atomic and using the same "
        "micro-batch count across DP ranks. Requested 3 non-empty micro-batches, but a rank has "
        "only 2 forced groups.",
    ),
    Sentence(
        "utils.seqlen_balancing:rearrange_micro_batches",
        lambda: balancing.rearrange_micro_batches(masked(2, length=4), 8, num_batches_divided_by=3),
        ValueError,
        "Cannot satisfy max_token_len while keeping forced groups atomic and using the same "
        "micro-batch count across DP ranks. Requested 3 non-empty micro-batches, but a rank has "
        "only 2 forced groups.",
    ),
    Sentence(
        "utils.seqlen_balancing:rearrange_micro_batches",
        lambda: balancing.rearrange_micro_batches(TensorDict({"input_ids": jagged(2, 4)}, [2]), 3),
        AssertionError,
        "max_token_len must be greater than the sequence length. Got max_token_len=3 and "
        "max_seq_len=tensor(4)",
    ),
    Sentence(
        "utils.seqlen_balancing:restore_dynamic_batch",
        lambda: balancing.restore_dynamic_batch(torch.ones(3), [[0], [1]]),
        AssertionError,
        "2 vs. 3",
    ),
    Sentence(
        "utils.ray_utils:parallel_put",
        lambda: ray_utils.parallel_put([]),
        AssertionError,
        "data_list must not be empty",
    ),
]
