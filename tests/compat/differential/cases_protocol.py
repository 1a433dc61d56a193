"""DataProto: constructed, indexed, selected from, renamed, cut and joined."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from batches import DataProto, batch, protocol
from plain import attempt, plain
from tensordict import TensorDict

ABSENT = "an absent part of a DataProto is like one without keys; verl fails inside"
OWN = "what a method returns has dicts of its own, so that changing them does not change the caller's batch"
SAME = "values are compared to any depth, arrays and tensors inside and NaN included; verl fails or refuses"
MESSAGE = "wrong input is refused with a message (an AssertionError), where verl fails inside"
INTENDED = {
    "case_construction_from_dict/lists as tensors": MESSAGE,
    "case_construction_from_dict/scalar string": MESSAGE,
    "case_indexing/meta shared by *": OWN,
    "case_selecting_and_popping/deep": "deepcopy=True copies the tensors, too, where all keys are chosen",
    "case_selecting_and_popping/* own": OWN,
    "case_selecting_and_popping/* without tensors": ABSENT,
    "case_renaming/lists": "several keys are renamed, each to its own; verl's fails for more than one",
    "case_chunk_and_split/zero": MESSAGE,
    "case_chunk_and_split/uneven, padding on, more than rows": "every rank gets a piece, the last ones without rows",
    "case_chunk_and_split/empty": "a batch without rows is cut into pieces without rows",
    "case_chunk_and_split/meta shared": OWN,
    "case_concat/none": MESSAGE,
    "case_concat/meta * equal": SAME,
    "case_concat/meta arrays differ": MESSAGE,
    "case_concat/first without tensors": "tensors that only some batches have are refused; verl drops them",
    "case_concat/second without tensors": MESSAGE,
}


def case_construction_from_dict() -> Any:
    ones = torch.ones(3, 2)
    return {
        "usual": plain(batch(3)),
        "no tensors": attempt(lambda: DataProto.from_dict(non_tensors={"a": ["x", "y"]})),
        "nothing": attempt(lambda: DataProto.from_dict()),
        "empty tensors": attempt(lambda: DataProto.from_dict(tensors={})),
        "empty dict, meta": attempt(lambda: DataProto.from_dict(tensors={}, meta_info={"a": 1})),
        "rows differ": attempt(lambda: DataProto.from_dict({"a": ones, "b": torch.ones(2, 2)})),
        "non-tensor rows differ": attempt(lambda: DataProto.from_dict({"a": ones}, {"b": ["x"]})),
        "two batch dims": attempt(
            lambda: DataProto.from_dict({"a": ones, "b": torch.zeros(3, 2, 4)}, num_batch_dims=2)
        ),
        "two batch dims and non tensors": attempt(
            lambda: DataProto.from_dict({"a": ones}, {"b": ["x", "y", "z"]}, num_batch_dims=2)
        ),
        "two batch dims differ": attempt(
            lambda: DataProto.from_dict({"a": ones, "b": torch.zeros(3, 3)}, num_batch_dims=2)
        ),
        "zero batch dims": attempt(lambda: DataProto.from_dict({"a": ones}, num_batch_dims=0)),
        "array among tensors": attempt(lambda: DataProto.from_dict({"a": np.ones(3)})),
        "tensor among non tensors": attempt(lambda: DataProto.from_dict({"a": ones}, {"b": ones})),
        "number column": attempt(lambda: DataProto.from_dict({"a": ones}, {"b": [1, 2, 3]})),
        "list column": attempt(lambda: DataProto.from_dict({"a": ones}, {"b": [[1], [2, 3], []]})),
        "even list column": attempt(lambda: DataProto.from_dict({"a": ones}, {"b": [[1], [2], [3]]})),
        "dict column": attempt(lambda: DataProto.from_dict({"a": ones}, {"b": [{"x": 1}, {}, {"y": 2}]})),
        "scalar tensor": attempt(lambda: DataProto.from_dict({"a": torch.tensor(1.0)})),
        "auto padding": attempt(lambda: DataProto.from_dict({"a": ones}, auto_padding=True)),
        "lists as tensors": attempt(lambda: DataProto.from_dict({"a": [1, 2]})),
        "scalar string": attempt(lambda: DataProto.from_dict({"a": ones}, {"b": "xyz"})),
        "tuple column": attempt(lambda: DataProto.from_dict({"a": ones}, {"b": ("x", "y", "z")})),
        "meta positional": attempt(lambda: DataProto.from_dict({"a": ones}, {}, {"m": 1}).meta_info),
    }


def case_construction_from_single_dict() -> Any:
    mixed = {"t": torch.arange(3), "a": np.array(["x", "y", "z"], dtype=object), "n": np.arange(3)}
    return {
        "mixed": attempt(lambda: DataProto.from_single_dict(mixed, meta_info={"k": 1})),
        "order": attempt(lambda: list(DataProto.from_single_dict(mixed).non_tensor_batch)),
        "list": attempt(lambda: DataProto.from_single_dict({"t": [1, 2, 3]})),
        "empty": attempt(lambda: DataProto.from_single_dict({})),
        "auto padding": attempt(lambda: DataProto.from_single_dict(mixed, auto_padding=True)),
        "arrays alone": attempt(lambda: DataProto.from_single_dict({"n": np.arange(3)})),
        "unlike rows": attempt(lambda: DataProto.from_single_dict({"t": torch.arange(3), "n": np.arange(2)})),
    }


def case_construction_directly() -> Any:
    return {
        "nothing": attempt(lambda: DataProto()),
        "length of nothing": attempt(lambda: len(DataProto())),
        "own dicts": DataProto().meta_info is not DataProto().meta_info,
        "tensordict": attempt(lambda: DataProto(TensorDict({"a": torch.ones(2)}, [2]))),
        "no batch dims": attempt(lambda: DataProto(TensorDict({"a": torch.ones(2)}, []))),
        "array checked": attempt(
            lambda: DataProto(TensorDict({"a": torch.ones(2)}, [2]), {"b": np.arange(3)})
        ),
        "list column": attempt(lambda: DataProto(TensorDict({"a": torch.ones(2)}, [2]), {"b": [1, 2]})),
        "object arrays only": attempt(
            lambda: len(DataProto(non_tensor_batch={"b": np.array([1, 2, 3], object)}))
        ),
        "arrays of unlike rows": attempt(
            lambda: DataProto(None, {"a": np.array([1], object), "b": np.array([1, 2], object)})
        ),
        "array of numbers": attempt(lambda: DataProto(None, {"a": np.arange(2)}).non_tensor_batch),
        "dict as batch": attempt(lambda: DataProto({"a": torch.ones(2)})),
        "item": attempt(lambda: protocol.DataProtoItem()),
        "length of tensors": len(batch(5)),
        "meta only": attempt(lambda: len(DataProto(meta_info={"a": 1}))),
        "zero-d array": attempt(lambda: DataProto(None, {"a": np.array(3)})),
        "equal": attempt(lambda: bool(DataProto() == DataProto())),
    }


def case_indexing() -> Any:
    data = batch()
    mask = [True, False, True, False, False, True]
    return {
        "int": attempt(lambda: data[1]),
        "negative": attempt(lambda: data[-1]),
        "out of range": attempt(lambda: data[6]),
        "numpy int": attempt(lambda: data[np.int64(2)]),
        "slice": attempt(lambda: data[1:4]),
        "step": attempt(lambda: data[::2]),
        "reversed": attempt(lambda: data[::-1]),
        "empty slice": attempt(lambda: data[2:2]),
        "list": attempt(lambda: data[[4, 1, 1]]),
        "bool list": attempt(lambda: data[mask]),
        "array": attempt(lambda: data[np.array([0, 5])]),
        "bool array": attempt(lambda: data[np.array(mask)]),
        "tensor": attempt(lambda: data[torch.tensor([3, 2])]),
        "bool tensor": attempt(lambda: data[torch.tensor(mask)]),
        "empty list": attempt(lambda: data[[]]),
        "range": attempt(lambda: data[range(2)]),
        "tuple": attempt(lambda: data[(0, 1)]),
        "string": attempt(lambda: data["obs"]),
        "none": attempt(lambda: data[None]),
        "float": attempt(lambda: data[1.0]),
        "int32 tensor": attempt(lambda: data[torch.tensor([1], dtype=torch.int32)]),
        "scalar tensor": attempt(lambda: data[torch.tensor(1)]),
        "list out of range": attempt(lambda: data[[7]]),
        "negative list": attempt(lambda: data[[-1, 0]]),
        "without tensors": attempt(lambda: DataProto.from_dict(non_tensors={"a": list("xyz")})[1]),
        "slice without tensors": attempt(lambda: DataProto.from_dict(non_tensors={"a": list("xyz")})[1:]),
        "list without tensors": attempt(lambda: DataProto.from_dict(non_tensors={"a": list("xyz")})[[2, 0]]),
        "iteration": attempt(lambda: [item.non_tensor_batch["n"] for item in data]),
        "select_idxs": attempt(lambda: data.select_idxs([5, 0])),
        "select_idxs tensor": attempt(lambda: data.select_idxs(torch.tensor([5, 0]))),
        "select_idxs bools": attempt(lambda: data.select_idxs(torch.tensor(mask))),
        "select_idxs bool list": attempt(lambda: data.select_idxs(mask)),
        "slice method": attempt(lambda: data.slice(1, 3)),
        "slice method steps": attempt(lambda: data.slice(step=3)),
        "slice method all": attempt(lambda: data.slice()),
        "meta shared by slices": data[0:1].meta_info is data.meta_info,
        "meta shared by lists": data[[0]].meta_info is data.meta_info,
        "memory shared by slices": data[0:1].batch["obs"].data_ptr() == data.batch["obs"].data_ptr(),
        "no batch at all": attempt(lambda: DataProto(meta_info={"a": 1})[0:1]),
    }


def case_selecting_and_popping() -> Any:
    def popped(**keys: Any) -> Any:
        data = batch(2, other=1)
        taken = data.pop(**keys)
        return [plain(taken), plain(data)]

    data = batch(2, other=1)
    deep = data.select(deepcopy=True)
    return {
        "all": attempt(lambda: data.select()),
        "some": attempt(lambda: data.select(["obs"], ["labels"], ["info"])),
        "none": attempt(lambda: data.select([], [], [])),
        "batch keys alone": attempt(lambda: data.select(batch_keys=["obs"])),
        "unknown": attempt(lambda: data.select(["nope"])),
        "unknown non tensor": attempt(lambda: data.select(non_tensor_batch_keys=["nope"])),
        "unknown meta": attempt(lambda: data.select(meta_info_keys=["nope"])),
        "order of keys": attempt(lambda: list(data.select(["act", "obs"]).batch.keys())),
        "order of non tensor keys": attempt(
            lambda: list(data.select(non_tensor_batch_keys=["n", "labels"]).non_tensor_batch)
        ),
        "tuple keys": attempt(lambda: data.select(("obs",))),
        "deep": deep.batch["obs"].data_ptr() != data.batch["obs"].data_ptr(),
        "shallow": data.select().batch["obs"].data_ptr() == data.batch["obs"].data_ptr(),
        "meta own": data.select().meta_info is not data.meta_info,
        "non tensor own": data.select().non_tensor_batch is not data.non_tensor_batch,
        "pop": attempt(
            lambda: popped(batch_keys=["obs"], non_tensor_batch_keys=["n"], meta_info_keys=["other"])
        ),
        "pop batch alone": attempt(lambda: popped(batch_keys=["obs", "act"])),
        "pop nothing": attempt(lambda: popped()),
        "pop non tensor alone": attempt(lambda: popped(non_tensor_batch_keys=["n"])),
        "pop meta alone": attempt(lambda: popped(meta_info_keys=["info"])),
        "pop unknown": attempt(lambda: popped(batch_keys=["nope"])),
        "pop unknown non tensor": attempt(lambda: popped(non_tensor_batch_keys=["nope"])),
        "pop unknown meta": attempt(lambda: popped(meta_info_keys=["nope"])),
        "pop without tensors": attempt(
            lambda: DataProto.from_dict(non_tensors={"a": ["x"]}).pop(batch_keys=["b"])
        ),
        "select without tensors": attempt(
            lambda: DataProto.from_dict(non_tensors={"a": ["x"]}).select(["b"])
        ),
    }


def case_renaming() -> Any:
    return {
        "one": attempt(lambda: batch(2).rename("obs", "seen")),
        "lists": attempt(lambda: batch(2).rename(["obs", "act"], ["a", "b"])),
        "gives itself": (lambda data: data.rename("obs", "seen") is data)(batch(2)),
        "lengths differ": attempt(lambda: batch(2).rename(["obs", "act"], ["a"])),
        "unknown": attempt(lambda: batch(2).rename("nope", "a")),
        "wrong type": attempt(lambda: batch(2).rename(1, "a")),
        "nothing": attempt(lambda: batch(2).rename()),
        "taken": attempt(lambda: batch(2).rename("obs", "act")),
        "mixed": attempt(lambda: batch(2).rename("obs", ["a"])),
        "tuple": attempt(lambda: batch(2).rename(("obs",), ("a",))),
        "non tensor": attempt(lambda: batch(2).rename("labels", "a")),
        "order": attempt(lambda: list(batch(2).rename("obs", "z").batch.keys())),
    }


def case_chunk_and_split() -> Any:
    data = batch()

    def without_tensors(rows: int, chunks: int) -> Any:
        return DataProto.from_dict(non_tensors={"a": list(range(rows))}).chunk(chunks)

    padded = DataProto.from_dict({"a": torch.arange(5)}, {"b": list("vwxyz")}, auto_padding=True)
    return {
        "even": attempt(lambda: data.chunk(3)),
        "one": attempt(lambda: data.chunk(1)),
        "uneven": attempt(lambda: data.chunk(4)),
        "more than rows": attempt(lambda: data.chunk(7)),
        "zero": attempt(lambda: data.chunk(0)),
        "without tensors": attempt(lambda: without_tensors(4, 2)),
        "uneven without tensors": attempt(lambda: without_tensors(5, 2)),
        "uneven, padding on": attempt(lambda: padded.chunk(2)),
        "uneven, padding on, more than rows": attempt(lambda: padded.chunk(8)),
        "split": attempt(lambda: data.split(2)),
        "split uneven": attempt(lambda: data.split(4)),
        "split beyond": attempt(lambda: data.split(9)),
        "split zero": attempt(lambda: data.split(0)),
        "meta shared": data.chunk(2)[0].meta_info is data.meta_info,
        "empty": attempt(lambda: data[0:0].chunk(2)),
        "nothing": attempt(lambda: DataProto(meta_info={"a": 1}).chunk(2)),
        "list": type(data.chunk(2)).__name__,
        "memory shared": data.chunk(2)[0].batch["obs"].data_ptr() == data.batch["obs"].data_ptr(),
    }


def case_concat() -> Any:
    def of(value: Any, **meta: Any) -> Any:
        return DataProto.from_dict({"a": torch.tensor([value])}, {"b": [str(value)]}, meta)

    concat = DataProto.concat
    metrics = [of(1, metrics={"loss": 1.0}), of(2, metrics={"loss": 2.0})]
    lists = [of(1, metrics=[{"x": 1}]), of(2, metrics=[{"x": 2}, {"x": 3}])]
    return {
        "usual": attempt(lambda: concat([of(1), of(2)])),
        "after chunk": attempt(lambda: concat(batch().chunk(3))),
        "one": attempt(lambda: concat([of(1, m=1)])),
        "one is itself": (lambda one: concat([one]) is one)(of(1)),
        "none": attempt(lambda: concat([])),
        "tuple": attempt(lambda: concat((of(1), of(2)))),
        "meta equal": attempt(lambda: concat([of(1, m=1), of(2, m=1)])),
        "meta differ": attempt(lambda: concat([of(1, m=1), of(2, m=2)])),
        "meta of one": attempt(lambda: concat([of(1, m=1), of(2, n=2)])),
        "meta tensors equal": attempt(lambda: concat([of(1, m=torch.ones(2)), of(2, m=torch.ones(2))])),
        "meta arrays equal": attempt(lambda: concat([of(1, m=np.ones(2)), of(2, m=np.ones(2))])),
        "meta arrays differ": attempt(lambda: concat([of(1, m=np.ones(2)), of(2, m=np.zeros(2))])),
        "metrics": attempt(lambda: concat(metrics)),
        "metrics of one": attempt(lambda: concat([of(1, metrics={"loss": 1.0})])),
        "metrics lists": attempt(lambda: concat(lists)),
        "metrics of the first": attempt(lambda: concat([of(1, metrics={"loss": 1.0}), of(2)])),
        "metrics of the second": attempt(lambda: concat([of(1), of(2, metrics={"loss": 1.0})])),
        "metrics unlike": attempt(lambda: concat([of(1, metrics={"a": 1.0}), of(2, metrics={"b": 1.0})])),
        "metrics none": attempt(lambda: concat([of(1, metrics=None), of(2, metrics=None)])),
        "metrics of list values": attempt(
            lambda: concat([of(1, metrics={"a": [1]}), of(2, metrics={"a": [2, 3]})])
        ),
        "keys unlike": attempt(
            lambda: concat([of(1), DataProto.from_dict({"z": torch.ones(1)}, {"b": ["x"]})])
        ),
        "non tensor keys unlike": attempt(
            lambda: concat([of(1), DataProto.from_dict({"a": torch.tensor([1])}, {"c": ["x"]})])
        ),
        "first without tensors": attempt(
            lambda: concat([DataProto.from_dict(non_tensors={"b": ["x"]}), of(1)])
        ),
        "second without tensors": attempt(
            lambda: concat([of(1), DataProto.from_dict(non_tensors={"b": ["x"]})])
        ),
        "all without tensors": attempt(lambda: concat([DataProto.from_dict(non_tensors={"b": ["x"]})] * 2)),
        "meta own": (lambda one: concat([one, of(2)]).meta_info is not one.meta_info)(of(1, m=1)),
        "shapes unlike": attempt(
            lambda: concat([of(1), DataProto.from_dict({"a": torch.ones(1, 2)}, {"b": ["x"]})])
        ),
        "empty pieces": attempt(lambda: concat([batch()[0:0], batch()[0:2]])),
    }
