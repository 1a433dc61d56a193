"""Unions of DataProtos, of TensorDicts, of columns of objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from batches import DataProto, batch, protocol
from plain import attempt, plain
from tensordict import TensorDict

ABSENT = "an absent part of a DataProto is like one without keys; verl fails inside"
SAME = "values are compared to any depth, arrays and tensors inside and NaN included; verl fails or refuses"
INTENDED = {
    "case_union/non tensor*": ABSENT,
    "case_union/meta*": ABSENT,
    "case_union/*empty*": ABSENT,
    "case_union/both without tensors": ABSENT,
    "case_union_functions/nested*": SAME,
    "case_union_functions/tensors inside": SAME,
    "case_union_functions/cycle": SAME,
    "case_union_functions/strings": SAME,
}


def case_union() -> Any:
    def other(**tensors: Any) -> Any:
        return DataProto.from_dict(tensors=tensors)

    def joined() -> Any:
        data, more = batch(2), other(x=torch.zeros(2))
        return [data.union(more) is data, plain(data), plain(more)]

    labels = np.array(["a", "b"], dtype=object)
    return {
        "new key": attempt(joined),
        "same key, equal": attempt(lambda: batch(2).union(batch(2))),
        "same key, other": attempt(lambda: batch(2).union(other(act=torch.tensor([9.0, 9.0])))),
        "same key, other dtype": attempt(lambda: batch(2).union(other(act=torch.tensor([0, 1])))),
        "other rows": attempt(lambda: batch(2).union(other(x=torch.zeros(3)))),
        "non tensor new": attempt(lambda: batch(2).union(DataProto(None, {"z": labels}))),
        "non tensor equal": attempt(lambda: batch(2).union(DataProto(None, {"labels": labels}))),
        "non tensor other": attempt(lambda: batch(2).union(DataProto(None, {"labels": labels[::-1]}))),
        "non tensor rows": attempt(lambda: batch(2).union(DataProto(None, {"z": np.array([1], object)}))),
        "meta new": attempt(lambda: batch(2).union(DataProto(meta_info={"z": 1}))),
        "meta equal": attempt(lambda: batch(2).union(DataProto(meta_info={"info": "here"}))),
        "meta other": attempt(lambda: batch(2).union(DataProto(meta_info={"info": "there"}))),
        "meta tensor": attempt(
            lambda: DataProto(meta_info={"a": torch.ones(2)}).union(DataProto(meta_info={"a": torch.ones(2)}))
        ),
        "empty with full": attempt(lambda: DataProto().union(batch(2))),
        "full with empty": attempt(lambda: batch(2).union(DataProto())),
        "both without tensors": attempt(
            lambda: DataProto(None, {"a": labels}).union(DataProto(None, {"b": labels}))
        ),
        "nan equal": attempt(
            lambda: other(a=torch.tensor([float("nan")])).union(other(a=torch.tensor([float("nan")])))
        ),
    }


def case_union_functions() -> Any:
    tensors = TensorDict({"a": torch.ones(2, 3)}, [2])

    def arrays(value: Any) -> Any:
        return {"a": np.array(value, dtype=object)}

    def cyclic() -> Any:
        row: list[Any] = [1]
        row.append(row)
        held = np.empty(1, dtype=object)
        held[0] = row
        return {"a": held}

    nan = float("nan")
    union = protocol.union_numpy_dict
    return {
        "tensors": attempt(
            lambda: protocol.union_tensor_dict(tensors.clone(), TensorDict({"b": torch.ones(2)}, [2]))
        ),
        "tensors in place": (
            lambda one: protocol.union_tensor_dict(one, TensorDict({"b": torch.ones(2)}, [2])) is one
        )(tensors.clone()),
        "tensors clash": attempt(
            lambda: protocol.union_tensor_dict(tensors, TensorDict({"a": torch.zeros(2, 3)}, [2]))
        ),
        "tensors equal": attempt(lambda: protocol.union_tensor_dict(tensors, tensors.clone())),
        "tensors of other rows": attempt(
            lambda: protocol.union_tensor_dict(tensors, TensorDict({"b": torch.ones(3)}, [3]))
        ),
        "arrays": attempt(lambda: union(arrays([1, 2]), {"b": np.arange(2)})),
        "arrays clash": attempt(lambda: union(arrays([1, 2]), arrays([1, 3]))),
        "arrays of other shape": attempt(lambda: union(arrays([1, 2]), arrays([1, 2, 3]))),
        "arrays of other dtype": attempt(lambda: union({"a": np.arange(2)}, {"a": np.arange(2.0)})),
        "objects and numbers": attempt(lambda: union({"a": np.arange(2)}, arrays([0, 1]))),
        "nan": attempt(lambda: union({"a": np.array([nan, 1])}, {"a": np.array([nan, 1])})),
        "nan among objects": attempt(lambda: union(arrays([nan, "x"]), arrays([float("nan"), "x"]))),
        "nested": attempt(
            lambda: union(arrays([{"x": np.arange(2)}, {}]), arrays([{"x": np.arange(2)}, {}]))
        ),
        "nested clash": attempt(
            lambda: union(arrays([{"x": np.arange(2)}, {}]), arrays([{"x": np.arange(1, 3)}, {}]))
        ),
        "nested lists": attempt(lambda: union(arrays([[1, [2]], [3]]), arrays([[1, [2]], [3]]))),
        "nested nan": attempt(
            lambda: union(arrays([[nan], {"a": nan}]), arrays([[float("nan")], {"a": float("nan")}]))
        ),
        "list and tuple": attempt(lambda: union(arrays([[1], (2, 3)]), arrays([[1], [2, 3]]))),
        "int and float": attempt(lambda: union(arrays([1, "a"]), arrays([1.0, "a"]))),
        "bool and int": attempt(lambda: union(arrays([1, "a"]), arrays([True, "a"]))),
        "tensors inside": attempt(
            lambda: union(arrays([{"t": torch.ones(2)}, 1]), arrays([{"t": torch.ones(2)}, 1]))
        ),
        "cycle": attempt(lambda: list(union(cyclic(), cyclic()))),
        "not an array": attempt(lambda: union({"a": [1]}, {"a": [1]})),
        "second not an array": attempt(lambda: union({"a": np.arange(1)}, {"a": [0]})),
        "in place": (lambda one: union(one, {"b": np.arange(2)}) is one)(arrays([1, 2])),
        "strings": attempt(lambda: union({"a": np.array(["x"])}, {"a": np.array(["x"])})),
        "keys of other order": attempt(
            lambda: union(arrays([{"a": 1, "b": 2}, 0]), arrays([{"b": 2, "a": 1}, 0]))
        ),
        "none": attempt(lambda: union(arrays([None, 1]), arrays([None, 1]))),
        "list of dicts": attempt(
            lambda: protocol.list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, {"a": 3, "b": 4}])
        ),
        "list of no dicts": attempt(lambda: protocol.list_of_dict_to_dict_of_list([])),
        "list of unlike dicts": attempt(lambda: protocol.list_of_dict_to_dict_of_list([{"a": 1}, {"b": 4}])),
        "list of growing dicts": attempt(
            lambda: protocol.list_of_dict_to_dict_of_list([{"a": 1}, {"a": 2, "b": 4}])
        ),
    }
