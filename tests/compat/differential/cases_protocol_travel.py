"""DataProto on its way: pickled, saved, serialised, converted."""

from __future__ import annotations

import copy
import io
import os
import pickle
import tempfile
from typing import Any

import numpy as np
import torch
from batches import DataProto, batch, protocol
from plain import attempt, load, plain
from tensordict import TensorDict

ABSENT = "an absent part of a DataProto is like one without keys; verl fails inside"
MESSAGE = "wrong input is refused with a message (an AssertionError), where verl fails inside"
INTENDED = {
    "case_serialising_functions/empty": "a tensor without elements travels, too",
    "case_tensordict_conversion/from objects": ABSENT,
    "case_tensordict_conversion/from even lists": ABSENT,
    "case_tensordict_conversion/from nothing": MESSAGE,
    "case_tensordict_conversion/*without tensors": ABSENT,
    "case_tensordict_conversion/nothing": ABSENT,
}


def case_pickling() -> Any:
    def back(data: Any, method: str | None = None) -> Any:
        if method is not None:
            os.environ["VERL_DATAPROTO_SERIALIZATION_METHOD"] = method
        try:
            return pickle.loads(pickle.dumps(data))
        finally:
            os.environ.pop("VERL_DATAPROTO_SERIALIZATION_METHOD", None)

    def saved() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            batch(2).save_to_disk(f"{folder}/data.pt")
            return plain(DataProto.load_from_disk(f"{folder}/data.pt"))

    def torch_saved() -> Any:
        sink = io.BytesIO()
        torch.save(batch(2), sink)
        sink.seek(0)
        return torch.load(sink, weights_only=False)

    nested = TensorDict(
        {"a": torch.nested.as_nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)}, [2]
    )
    half = DataProto.from_dict(
        {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.tensor([True, False])}
    )
    return {
        "usual": attempt(lambda: back(batch(2))),
        "numpy": attempt(lambda: back(batch(2), "numpy")),
        "numpy, half and bool": attempt(lambda: back(half, "numpy")),
        "half": attempt(lambda: back(half)),
        "nested": attempt(lambda: back(DataProto(nested))),
        "nested, numpy": attempt(lambda: back(DataProto(nested), "numpy")),
        "without tensors": attempt(lambda: back(DataProto.from_dict(non_tensors={"a": ["x"]}))),
        "without tensors, numpy": attempt(
            lambda: back(DataProto.from_dict(non_tensors={"a": ["x"]}), "numpy")
        ),
        "slice": attempt(lambda: back(batch()[2:4])),
        "writable": attempt(lambda: back(batch(2), "numpy").batch["act"].add_(1)),
        "deepcopy": attempt(lambda: copy.deepcopy(batch(2))),
        "copy": attempt(lambda: copy.copy(batch(2))),
        "empty rows": attempt(lambda: back(batch()[0:0])),
        "saved": attempt(saved),
        "torch.save": attempt(torch_saved),
        "other method": attempt(lambda: back(batch(2), "other")),
        "size of a slice": len(pickle.dumps(DataProto.from_dict({"a": torch.zeros(100_000)})[0:10])) < 20_000,
    }


def case_serialising_functions() -> Any:
    def there_and_back(tensor: torch.Tensor) -> Any:
        return protocol.deserialize_single_tensor(protocol.serialize_single_tensor(tensor))

    def form(tensor: torch.Tensor) -> Any:
        dtype, shape, data = protocol.serialize_single_tensor(tensor)
        return [dtype, plain(shape), type(data).__name__, memoryview(data).nbytes]

    held = TensorDict({"a": torch.arange(6).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}, [2])
    jagged = torch.nested.as_nested_tensor([torch.arange(2.0), torch.arange(3.0)], layout=torch.jagged)
    return {
        "form": attempt(lambda: form(torch.arange(6).reshape(2, 3))),
        "form of bfloat16": attempt(lambda: form(torch.ones(2, dtype=torch.bfloat16))),
        "int": attempt(lambda: there_and_back(torch.arange(6).reshape(2, 3))),
        "bool": attempt(lambda: there_and_back(torch.tensor([True, False]))),
        "scalar": attempt(lambda: there_and_back(torch.tensor(3.5))),
        "empty": attempt(lambda: there_and_back(torch.zeros(0, 3))),
        "not contiguous": attempt(lambda: there_and_back(torch.arange(6).reshape(2, 3).t())),
        "wants grad": attempt(lambda: there_and_back(torch.ones(2, requires_grad=True))),
        "writable": attempt(lambda: there_and_back(torch.ones(2)).add_(1)),
        "tensordict form": attempt(
            lambda: [type(part).__name__ for part in protocol.serialize_tensordict(held)]
        ),
        "tensordict head": attempt(lambda: list(protocol.serialize_tensordict(held)[:2])),
        "tensordict keys": attempt(lambda: list(protocol.serialize_tensordict(held)[2])),
        "tensordict entry": attempt(
            lambda: [type(part).__name__ for part in protocol.serialize_tensordict(held)[2]["a"]]
        ),
        "tensordict back": attempt(
            lambda: protocol.deserialize_tensordict(protocol.serialize_tensordict(held))
        ),
        "nested back": attempt(
            lambda: protocol.deserialize_tensordict(
                protocol.serialize_tensordict(TensorDict({"a": jagged}, [2]))
            )
        ),
        "nested entry": attempt(
            lambda: [
                type(part).__name__
                for part in protocol.serialize_tensordict(TensorDict({"a": jagged}, [2]))[2]["a"]
            ]
        ),
        "nested entry kind": attempt(
            lambda: protocol.serialize_tensordict(TensorDict({"a": jagged}, [2]))[2]["a"][0]
        ),
        "plain entry kind": attempt(lambda: protocol.serialize_tensordict(held)[2]["a"][0]),
    }


def case_tensordict_conversion() -> Any:
    utils = load("utils.tensordict_utils")
    data = batch(3)
    mixed = utils.get_tensordict(
        {"t": torch.arange(2), "s": ["x", "y"], "l": [[1], [2, 3]]}, {"m": 5, "k": [1, 2, 3]}
    )
    return {
        "to": attempt(lambda: data.to_tensordict()),
        "there and back": attempt(lambda: DataProto.from_tensordict(data.to_tensordict())),
        "from mixed": attempt(lambda: DataProto.from_tensordict(mixed)),
        "from mixed with meta": attempt(
            lambda: DataProto.from_tensordict(mixed, meta_info={"extra": 1}).meta_info
        ),
        "mixed back": attempt(lambda: DataProto.from_tensordict(mixed).to_tensordict()),
        "from plain": attempt(lambda: DataProto.from_tensordict(TensorDict({"a": torch.ones(2)}, [2]))),
        "from objects": attempt(lambda: DataProto.from_tensordict(utils.get_tensordict({"s": ["x", "y"]}))),
        "from even lists": attempt(
            lambda: DataProto.from_tensordict(utils.get_tensordict({"l": [[1, 2], [3, 4]]}))
        ),
        "from nothing": attempt(lambda: DataProto.from_tensordict()),
        "source unchanged": attempt(lambda: (DataProto.from_tensordict(mixed), sorted(mixed.keys()))[1]),
        "without tensors": attempt(
            lambda: DataProto.from_dict(non_tensors={"a": ["x", "y"]}).to_tensordict()
        ),
        "nothing": attempt(lambda: DataProto().to_tensordict()),
        "list meta": attempt(
            lambda: DataProto.from_dict({"a": torch.ones(3)}, meta_info={"k": [1, 2]}).to_tensordict()
        ),
        "dict meta": attempt(
            lambda: DataProto.from_dict(
                {"a": torch.ones(3)}, meta_info={"k": {"x": 1}, "n": None}
            ).to_tensordict()
        ),
        "list column": attempt(
            lambda: DataProto.from_dict({"a": torch.ones(2)}, {"b": [[1, 2], [3, 4]]}).to_tensordict()
        ),
        "array rows": attempt(
            lambda: DataProto.from_dict(
                {"a": torch.ones(2)}, {"b": np.array([np.arange(2), np.arange(3)], dtype=object)}
            ).to_tensordict()
        ),
        "two batch dims": attempt(
            lambda: DataProto.from_tensordict(TensorDict({"a": torch.ones(2, 3)}, [2, 3]), num_batch_dims=2)
        ),
        "clash of meta": attempt(lambda: DataProto.from_tensordict(mixed, meta_info={"m": 6}).meta_info),
    }
