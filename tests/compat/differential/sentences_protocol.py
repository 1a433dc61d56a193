"""What `protocol` refuses, in verl's own words."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from batches import DataProto, protocol
from sentence import Sentence
from tensordict import TensorDict


def tensors(count: int, start: int = 0) -> TensorDict:
    return TensorDict({"obs": torch.arange(start, start + count)}, [count])


def rows(count: int, act: torch.Tensor | None = None, **meta: Any) -> Any:
    held = {"obs": torch.arange(count), "act": torch.zeros(count) if act is None else act}
    return DataProto.from_dict(held, {"names": ["x"] * count}, {"info": "here", **meta})


def objects(*values: str) -> dict[str, Any]:
    return {"key": np.array(values, dtype=object)}


def mixed(count: int) -> Any:
    return DataProto.from_dict({"obs": torch.arange(count)}, {}, {"name": "x"}).to_tensordict()


SENTENCES = [
    Sentence(
        "protocol:_DataProtoConfigMeta.auto_padding",
        lambda: setattr(protocol.DataProtoConfig, "auto_padding", 1),
        AssertionError,
        "enabled must be a boolean, got 1 as <class 'int'>",
    ),
    Sentence(
        "protocol:pad_dataproto_to_divisor",
        lambda: protocol.pad_dataproto_to_divisor([1], 2),
        AssertionError,
        "data must be a DataProto",
    ),
    Sentence(
        "protocol:union_tensor_dict",
        lambda: protocol.union_tensor_dict(tensors(2), tensors(3)),
        AssertionError,
        "Two tensor dict must have identical batch size. Got torch.Size([2]) and torch.Size([3])",
    ),
    Sentence(
        "protocol:union_tensor_dict",
        lambda: protocol.union_tensor_dict(tensors(2), tensors(2, start=5)),
        AssertionError,
        "obs in tensor_dict1 and tensor_dict2 are not the same object",
    ),
    Sentence(
        "protocol:union_tensor_dict",
        lambda: rows(2).union(rows(3)),
        AssertionError,
        "Two tensor dict must have identical batch size. Got torch.Size([2]) and torch.Size([3])",
    ),
    Sentence(
        "protocol:union_tensor_dict",
        lambda: rows(2).union(rows(2, act=torch.ones(2))),
        AssertionError,
        "act in tensor_dict1 and tensor_dict2 are not the same object",
    ),
    Sentence(
        "utils.py_functional:union_two_dict",
        lambda: rows(2).union(rows(2, info="there")),
        AssertionError,
        "info in meta_dict1 and meta_dict2 are not the same object",
    ),
    Sentence(
        "protocol:union_numpy_dict",
        lambda: protocol.union_numpy_dict(objects("a", "b"), objects("a", "c")),
        AssertionError,
        "`key` in tensor_dict1 and tensor_dict2 are not the same object.",
    ),
    Sentence(
        "protocol:deserialize_tensordict",
        lambda: protocol.deserialize_tensordict(((2,), None, {"a": ("float32",)})),
        ValueError,
        "Invalid tensor encoding format, expected length 2 or 3, got 1",
    ),
    Sentence(
        "protocol:deserialize_tensordict",
        lambda: protocol.deserialize_tensordict(((2,), None, {"a": ("float32", (2,), b"", 0)})),
        ValueError,
        "Invalid tensor encoding format, expected length 2 or 3, got 4",
    ),
    Sentence(
        "protocol:DataProto.__getitem__",
        lambda: rows(2)["obs"],
        TypeError,
        "Indexing with <class 'str'> is not supported",
    ),
    Sentence(
        "protocol:DataProto.__getitem__",
        lambda: rows(2)[1.5],
        TypeError,
        "Indexing with <class 'float'> is not supported",
    ),
    Sentence(
        "protocol:DataProto.check_consistency",
        lambda: DataProto(TensorDict({"a": torch.ones(2, 3)}, [2, 3])),
        AssertionError,
        "only support num_batch_dims=1",
    ),
    Sentence(
        "protocol:DataProto.check_consistency",
        lambda: DataProto(TensorDict({}, [])),
        AssertionError,
        "only support num_batch_dims=1",
    ),
    Sentence(
        "protocol:DataProto.check_consistency",
        lambda: DataProto(tensors(2), objects("a")),
        AssertionError,
        "key key length 1 is not equal to batch size 2",
    ),
    Sentence(
        "protocol:DataProto.check_consistency",
        lambda: DataProto.from_dict({"a": torch.ones(2)}, {"key": ["x"]}),
        AssertionError,
        "key key length 1 is not equal to batch size 2",
    ),
    Sentence(
        "protocol:DataProto.from_single_dict",
        lambda: DataProto.from_single_dict({"a": [1, 2]}),
        ValueError,
        "Unsupported type in data <class 'list'>",
    ),
    Sentence(
        "protocol:DataProto.from_dict",
        lambda: DataProto.from_dict({"a": torch.ones(2)}, num_batch_dims=0),
        AssertionError,
        "num_batch_dims must be greater than zero",
    ),
    Sentence(
        "protocol:DataProto.from_dict",
        lambda: DataProto.from_dict({"a": torch.ones(2, 2)}, {"b": ["x", "y"]}, num_batch_dims=2),
        AssertionError,
        "only support num_batch_dims=1 when non_tensors is not None.",
    ),
    Sentence(
        "protocol:DataProto.from_dict",
        lambda: DataProto.from_dict({"a": torch.ones(2), "b": torch.ones(3)}),
        AssertionError,
        "Not all the tensor in tensors have the same batch size with batch_dims=1. Got a has "
        "torch.Size([2]), b has torch.Size([3])",
    ),
    Sentence(
        "protocol:DataProto.from_dict",
        lambda: DataProto.from_dict({"a": torch.ones(2, 4), "b": torch.ones(2, 3)}, num_batch_dims=2),
        AssertionError,
        "Not all the tensor in tensors have the same batch size with batch_dims=2. Got a has "
        "torch.Size([2, 4]), b has torch.Size([2, 3])",
    ),
    Sentence(
        "protocol:DataProto.from_tensordict",
        lambda: DataProto.from_tensordict(tensors(2), num_batch_dims=0),
        AssertionError,
        "num_batch_dims must be greater than zero",
    ),
    Sentence(
        "protocol:DataProto.from_tensordict",
        lambda: DataProto.from_tensordict(mixed(2), num_batch_dims=2),
        AssertionError,
        "only support num_batch_dims=1 when tensor_dict contains non tensor data.",
    ),
    Sentence(
        "protocol:DataProto.check_consistency",
        lambda: DataProto.from_tensordict(TensorDict({"a": torch.ones(2, 3)}, [2]), num_batch_dims=2),
        AssertionError,
        "only support num_batch_dims=1",
    ),
    Sentence(
        "protocol:DataProto.rename.validate_input",
        lambda: rows(2).rename(("obs",), ("seen",)),
        TypeError,
        "keys must be a list or a string, but got <class 'tuple'>",
    ),
    Sentence(
        "protocol:DataProto.rename",
        lambda: rows(2).rename(["obs", "act"], ["seen"]),
        ValueError,
        "new_keys and old_keys must have the same length, but got 1 and 2",
    ),
    Sentence(
        "protocol:DataProto.make_iterator",
        lambda: rows(6).make_iterator(4, epochs=1),
        AssertionError,
        "6 % 4 != 0",
    ),
    Sentence(
        "protocol:DataProto.chunk",
        lambda: rows(7).chunk(2),
        AssertionError,
        "only support equal chunk. Got size of DataProto 7 and chunk 2.",
    ),
    Sentence(
        "protocol:DataProto.concat",
        lambda: DataProto.concat([rows(2, config=1), rows(2, config=2)]),
        AssertionError,
        "Conflicting values for meta_info key 'config'",
    ),
    Sentence(
        "utils.py_functional:list_of_dict_to_dict_of_list",
        lambda: DataProto.concat([rows(2), rows(2, metrics={"a": 1}), rows(2, metrics={"b": 1})]),
        AssertionError,
        "Key 'b' is not present in the keys of the first dictionary in the list.",
    ),
    Sentence(
        "utils.py_functional:list_of_dict_to_dict_of_list",
        lambda: DataProto.concat(
            [DataProto(None, objects("a")), DataProto(None, {"key": np.array([1]), "z": np.array([1])})]
        ),
        AssertionError,
        "Key 'z' is not present in the keys of the first dictionary in the list.",
    ),
    Sentence(
        "protocol:DataProto.sample_level_repeat",
        lambda: rows(2).sample_level_repeat(2),
        AssertionError,
        "repeat_times type must be in [list, torch.Tensor, np.ndarray, tuple], got <class 'int'>",
    ),
    Sentence(
        "protocol:DataProto.to_tensordict",
        lambda: DataProto(tensors(2), {"obs": np.array([1, 2])}).to_tensordict(),
        AssertionError,
        "tensor_batch and non_tensor_batch have common keys {'obs'}",
    ),
    Sentence(
        "protocol:BatchData.concat",
        lambda: protocol.BatchData([]).concat(),
        ValueError,
        "Cannot concatenate an empty list of data items.",
    ),
]
