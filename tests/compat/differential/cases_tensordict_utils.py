"""`utils.tensordict_utils`: one function per subject, each gives plain comparable values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from plain import attempt, load, plain
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData, NonTensorStack

utils = load("utils.tensordict_utils")


MESSAGE = "wrong input is refused with a message (an AssertionError), where verl fails inside"
NESTED = "nested tensors are padded, cut, joined and compared like others; verl fails inside"
INDICES = "masks, arrays and empty lists are taken as indices; verl fails inside"
STRICT = "shapes must agree and values of any type can be compared; verl broadcasts, or fails inside"
INTENDED = {
    "case_making/non tensor is a stack": "a column of objects is kept as it is",
    "case_making/empty list": "a column without rows makes a batch without rows",
    "case_assigning/*of other rows": MESSAGE,
    "case_assigning/stack of nothing": MESSAGE,
    "case_reading/*no*": "a selection of no keys still has the rows of the batch",
    "case_cutting/chunk zero": MESSAGE,
    "case_cutting/index *": INDICES,
    "case_joining/nested none": MESSAGE,
    "case_joining/union nested": NESTED,
    "case_joining/nested of a list of wide": "without ragged_idx the dim in which the rows differ is the ragged one",
    "case_padding/pad zero": MESSAGE,
    "case_padding/*pad": NESTED,
    "case_comparing/shape": STRICT,
    "case_comparing/rows": STRICT,
    "case_comparing/array value": STRICT,
}


def jagged(*lengths: int, width: int | None = None) -> torch.Tensor:
    rows = [torch.arange(n) if width is None else torch.ones(n, width) * n for n in lengths]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def mixed(rows: int = 4) -> Any:
    """A tensor, a jagged tensor, a stack of objects, and a value of the whole batch."""
    return utils.get_tensordict(
        {
            "obs": torch.arange(rows * 2).reshape(rows, 2),
            "ids": jagged(*(i + 1 for i in range(rows))),
            "names": [f"r{i}" for i in range(rows)],
        },
        {"temperature": 0.5, "flags": ["a", "b"]},
    )


def case_making() -> Any:
    get = utils.get_tensordict
    return {
        "mixed": plain(mixed(2)),
        "sizes": list(mixed(3).batch_size),
        "rows differ": attempt(lambda: get({"a": torch.ones(2), "b": torch.ones(3)})),
        "list rows differ": attempt(lambda: get({"a": torch.ones(2), "b": ["x"]})),
        "lists alone": attempt(lambda: get({"b": ["x", "y"]})),
        "nothing": attempt(lambda: get({})),
        "non tensors alone": attempt(lambda: get({}, {"a": 1})),
        "list of numbers": attempt(lambda: get({"b": [1, 2]})),
        "list of lists": attempt(lambda: get({"b": [[1, 2], [3]]})),
        "list of even lists": attempt(lambda: get({"b": [[1, 2], [3, 4]]})),
        "list of dicts": attempt(lambda: get({"b": [{"x": 1}, {"y": [2]}]})),
        "list of tensors": attempt(lambda: get({"b": [torch.ones(2), torch.ones(3)]})),
        "list of arrays": attempt(lambda: get({"b": [np.ones(2), np.ones(2)]})),
        "array": attempt(lambda: get({"b": np.arange(2)})),
        "scalar tensor": attempt(lambda: get({"b": torch.tensor(1)})),
        "number": attempt(lambda: get({"b": 1})),
        "string": attempt(lambda: get({"b": "xy"})),
        "none": attempt(lambda: get({"b": [None, 1]})),
        "non tensor is a tensor": attempt(lambda: get({"a": torch.ones(2)}, {"b": torch.ones(3)})),
        "non tensor is a number": attempt(lambda: get({"a": torch.ones(2)}, {"b": 1})),
        "non tensor is a dict": attempt(lambda: get({"a": torch.ones(2)}, {"b": {"x": [1]}})),
        "non tensor is none": attempt(lambda: get({"a": torch.ones(2)}, {"b": None})),
        "non tensor is an array": attempt(lambda: get({"a": torch.ones(2)}, {"b": np.ones(3)})),
        "non tensor is a stack": attempt(
            lambda: get(
                {"a": torch.ones(2)}, {"b": NonTensorStack.from_list([NonTensorData(1), NonTensorData(2)])}
            )
        ),
        "stack": attempt(
            lambda: get({"b": NonTensorStack.from_list([NonTensorData("x"), NonTensorData("y")])})
        ),
        "same key": attempt(lambda: get({"a": torch.ones(2)}, {"a": 1})),
        "empty list": attempt(lambda: get({"a": []})),
        "caller unchanged": (lambda given: (get(given), sorted(type(v).__name__ for v in given.values()))[1])(
            {"a": ["x"]}
        ),
        "of dicts": attempt(
            lambda: utils.list_of_dict_to_tensordict(
                [{"a": torch.ones(2), "b": "x"}, {"a": torch.zeros(2), "b": "y"}]
            )
        ),
        "of dicts, ragged": attempt(
            lambda: utils.list_of_dict_to_tensordict([{"a": torch.ones(2)}, {"a": torch.zeros(3)}])
        ),
        "of dicts, numbers": attempt(
            lambda: utils.list_of_dict_to_tensordict([{"a": 1, "b": [1]}, {"a": 2, "b": [2, 3]}])
        ),
        "of dicts, scalars": attempt(
            lambda: utils.list_of_dict_to_tensordict([{"a": torch.tensor(1)}, {"a": torch.tensor(2)}])
        ),
        "of dicts, arrays": attempt(
            lambda: utils.list_of_dict_to_tensordict([{"a": np.ones(2)}, {"a": np.ones(2)}])
        ),
        "of dicts, unlike": attempt(lambda: utils.list_of_dict_to_tensordict([{"a": 1}, {"b": 2}])),
        "of no dicts": attempt(lambda: utils.list_of_dict_to_tensordict([])),
        "of dicts, ragged wide": attempt(
            lambda: utils.list_of_dict_to_tensordict([{"a": torch.ones(2, 2)}, {"a": torch.zeros(3, 2)}])
        ),
        "of dicts, ragged last": attempt(
            lambda: utils.list_of_dict_to_tensordict([{"a": torch.ones(2, 2)}, {"a": torch.zeros(2, 3)}])
        ),
    }


def case_assigning() -> Any:
    def after(change: Any) -> Any:
        data = TensorDict({"a": torch.ones(2)}, [2])
        given = change(data)
        return [plain(given), plain(data)]

    value, stack, many = utils.assign_non_tensor_data, utils.assign_non_tensor_stack, utils.assign_non_tensor
    return {
        "value": attempt(lambda: after(lambda d: value(d, "k", 1))),
        "list value": attempt(lambda: after(lambda d: value(d, "k", [1, 2, 3]))),
        "dict value": attempt(lambda: after(lambda d: value(d, "k", {"x": 1}))),
        "none value": attempt(lambda: after(lambda d: value(d, "k", None))),
        "tensor value": attempt(lambda: after(lambda d: value(d, "k", torch.ones(3)))),
        "wrapped value": attempt(lambda: after(lambda d: value(d, "k", NonTensorData(4)))),
        "stack": attempt(lambda: after(lambda d: stack(d, "k", ["x", "y"]))),
        "stack of lists": attempt(lambda: after(lambda d: stack(d, "k", [[1], [2, 3]]))),
        "stack of dicts": attempt(lambda: after(lambda d: stack(d, "k", [{"x": 1}, {}]))),
        "stack of other rows": attempt(lambda: after(lambda d: stack(d, "k", ["x"]))),
        "stack of one value": attempt(lambda: after(lambda d: stack(d, "k", "xy"))),
        "stack of nothing": attempt(lambda: after(lambda d: stack(d, "k", []))),
        "many": attempt(lambda: after(lambda d: many(d, k=1, s=["x", "y"]))),
        "many, nested list": attempt(lambda: after(lambda d: many(d, s=[[1], [2, 3]]))),
        "many, list of other rows": attempt(lambda: after(lambda d: many(d, s=["x"]))),
        "many, dict": attempt(lambda: after(lambda d: many(d, s={"x": 1}))),
        "many, none": attempt(lambda: after(lambda d: many(d, s=None))),
        "many, stack": attempt(
            lambda: after(lambda d: many(d, s=NonTensorStack.from_list([NonTensorData(1), NonTensorData(2)])))
        ),
        "many, value": attempt(lambda: after(lambda d: many(d, s=NonTensorData(1)))),
        "not a tensordict": attempt(lambda: value({}, "k", 1)),
        "not a tensordict, stack": attempt(lambda: stack({}, "k", [1])),
        "not a tensordict, many": attempt(lambda: many({}, k=1)),
    }


def case_reading() -> Any:
    data = mixed(2)

    def popped(*arguments: Any) -> Any:
        held = mixed(2)
        given = utils.pop(held, *arguments)
        return [plain(given), list(held.keys())]

    def popped_keys(keys: Any) -> Any:
        held = mixed(2)
        given = utils.pop_keys(held, keys)
        return [plain(given), list(held.keys())]

    return {
        "tensor": attempt(lambda: utils.get(data, "obs")),
        "stack": attempt(lambda: utils.get(data, "names")),
        "value": attempt(lambda: utils.get(data, "temperature")),
        "list value": attempt(lambda: utils.get(data, "flags")),
        "nested": attempt(lambda: utils.get(data, "ids")),
        "missing": attempt(lambda: utils.get(data, "nope")),
        "missing with default": attempt(lambda: utils.get(data, "nope", 5)),
        "keys": attempt(lambda: utils.get_keys(data, ["obs", "names", "temperature"])),
        "keys, order": attempt(lambda: list(utils.get_keys(data, ["names", "obs"]).keys())),
        "keys, missing": attempt(lambda: utils.get_keys(data, ["nope"])),
        "keys, none": attempt(lambda: utils.get_keys(data, [])),
        "keys, generator": attempt(lambda: utils.get_keys(data, (k for k in ["obs"]))),
        "pop": attempt(lambda: popped("obs")),
        "pop stack": attempt(lambda: popped("names")),
        "pop value": attempt(lambda: popped("temperature")),
        "pop missing": attempt(lambda: popped("nope")),
        "pop missing with default": attempt(lambda: popped("nope", 5)),
        "pop keys": attempt(lambda: popped_keys(["obs", "names", "temperature"])),
        "pop missing keys": attempt(lambda: popped_keys(["nope"])),
        "pop no keys": attempt(lambda: popped_keys([])),
        "non tensor": attempt(lambda: utils.get_non_tensor_data(data, "temperature", None)),
        "non tensor stack": attempt(lambda: utils.get_non_tensor_data(data, "names", None)),
        "non tensor default": attempt(lambda: utils.get_non_tensor_data(data, "nope", 7)),
        "non tensor of a tensor": attempt(lambda: utils.get_non_tensor_data(data, "obs", None)),
        "unwrap value": attempt(lambda: utils.unwrap_non_tensor_data(NonTensorData(3))),
        "unwrap stack": attempt(lambda: utils.unwrap_non_tensor_data(data.get("names"))),
        "unwrap other": attempt(lambda: utils.unwrap_non_tensor_data([1])),
        "unwrap row": attempt(lambda: utils.unwrap_non_tensor_data(data[0].get("names"))),
        "subscript": attempt(
            lambda: [plain(data["names"]), plain(data["temperature"]), plain(data["flags"])]
        ),
    }


def case_cutting() -> Any:
    data = mixed(4)
    wide = TensorDict({"p": jagged(1, 3, 2, 2, width=2), "o": torch.arange(4)}, [4])
    chunk, index = utils.chunk_tensordict, utils.index_select_tensor_dict
    return {
        "chunk": attempt(lambda: chunk(data, 2)),
        "chunk kind": attempt(lambda: type(chunk(data, 2)).__name__),
        "chunk wide": attempt(lambda: chunk(wide, 4)),
        "chunk uneven": attempt(lambda: chunk(data, 3)),
        "chunk beyond": attempt(lambda: chunk(data, 8)),
        "chunk one": attempt(lambda: chunk(data, 1)),
        "chunk zero": attempt(lambda: chunk(data, 0)),
        "chunk not a tensordict": attempt(lambda: chunk([1], 1)),
        "chunk nested 3d": attempt(lambda: chunk(TensorDict({"p": position_ids(2, 4, 3, 3)}, [4]), 2)),
        "index": attempt(lambda: index(data, [3, 0])),
        "index tensor": attempt(lambda: index(data, torch.tensor([1]))),
        "index bools": attempt(lambda: index(data, torch.tensor([True, False, True, False]))),
        "index repeated": attempt(lambda: index(wide, [1, 1, 0])),
        "index array": attempt(lambda: index(data, np.array([1, 2]))),
        "index two dims": attempt(lambda: index(data, torch.tensor([[1, 2]]))),
        "index beyond": attempt(lambda: index(data, [9])),
        "index nothing": attempt(lambda: index(TensorDict({"a": torch.ones(2)}, [2]), [])),
        "index nested 3d": attempt(lambda: index(TensorDict({"p": position_ids(2, 4, 3)}, [3]), [2, 0])),
    }


def position_ids(*lengths: int) -> torch.Tensor:
    """The ragged position ids of a model with three kinds of positions: rows of (3, length)."""
    return torch.nested.as_nested_tensor(
        [torch.arange(3 * n).reshape(3, n) for n in lengths], layout=torch.jagged
    )


def case_joining() -> Any:
    concat, nested = utils.concat_tensordict, utils.concat_nested_tensors
    data = mixed(4)
    plain_values = [utils.get_tensordict({"a": torch.ones(1)}, {"k": k}) for k in (1, 2)]
    no_size = [TensorDict({"k": NonTensorData(k)}, []) for k in (1, 2)]
    return {
        "after chunk": attempt(lambda: concat(utils.chunk_tensordict(data, 2))),
        "one": attempt(lambda: concat([data])),
        "none": attempt(lambda: concat([])),
        "values differ": attempt(lambda: concat(plain_values)),
        "no batch size": attempt(lambda: concat(no_size)),
        "keys differ": attempt(
            lambda: concat([TensorDict({"a": torch.ones(1)}, [1]), TensorDict({"b": torch.ones(1)}, [1])])
        ),
        "tuple": attempt(lambda: concat(tuple(utils.chunk_tensordict(data, 2)))),
        "nested": attempt(lambda: nested([jagged(1, 2), jagged(3)])),
        "nested wide": attempt(lambda: nested([jagged(1, 2, width=2), jagged(3, width=2)])),
        "nested one": attempt(lambda: nested([jagged(1, 2)])),
        "nested none": attempt(lambda: nested([])),
        "nested and not": attempt(lambda: nested([jagged(1), torch.ones(1)])),
        "nested 3d": attempt(lambda: nested([position_ids(2, 4), position_ids(3)])),
        "stacks": attempt(
            lambda: concat([utils.get_tensordict({"b": ["x"]}), utils.get_tensordict({"b": ["y", "z"]})])
        ),
        "stacks of lists": attempt(
            lambda: concat([utils.get_tensordict({"b": [[1]]}), utils.get_tensordict({"b": [[2], [3, 4]]})])
        ),
        "empty batch": attempt(lambda: concat([TensorDict({}, []), TensorDict({}, [])])),
        "union": attempt(
            lambda: utils.union_tensor_dict(
                TensorDict({"a": torch.ones(2)}, [2]), TensorDict({"b": torch.ones(2)}, [2])
            )
        ),
        "union clash": attempt(
            lambda: utils.union_tensor_dict(
                TensorDict({"a": torch.ones(2)}, [2]), TensorDict({"a": torch.zeros(2)}, [2])
            )
        ),
        "union equal": attempt(
            lambda: utils.union_tensor_dict(
                TensorDict({"a": torch.ones(2)}, [2]), TensorDict({"a": torch.ones(2)}, [2])
            )
        ),
        "union rows": attempt(
            lambda: utils.union_tensor_dict(
                TensorDict({"a": torch.ones(2)}, [2]), TensorDict({"b": torch.ones(3)}, [3])
            )
        ),
        "union non tensors": attempt(
            lambda: utils.union_tensor_dict(mixed(2), utils.get_tensordict({"z": ["p", "q"]}, {"n": 1}))
        ),
        "union equal non tensors": attempt(
            lambda: utils.union_tensor_dict(
                utils.get_tensordict({"z": ["p", "q"]}, {"n": 1}),
                utils.get_tensordict({"z": ["p", "q"]}, {"n": 1}),
            )
        ),
        "union clash of stacks": attempt(
            lambda: utils.union_tensor_dict(
                utils.get_tensordict({"z": ["p", "q"]}), utils.get_tensordict({"z": ["p", "r"]})
            )
        ),
        "union clash of values": attempt(
            lambda: utils.union_tensor_dict(
                utils.get_tensordict({"z": ["p"]}, {"n": 1}), utils.get_tensordict({"z": ["p"]}, {"n": 2})
            )
        ),
        "union in place": (
            lambda one: utils.union_tensor_dict(one, TensorDict({"b": torch.ones(2)}, [2])) is one
        )(TensorDict({"a": torch.ones(2)}, [2])),
        "union nested": attempt(
            lambda: utils.union_tensor_dict(
                TensorDict({"a": jagged(1, 2)}, [2]), TensorDict({"a": jagged(1, 2)}, [2])
            )
        ),
        "nested of a list": attempt(
            lambda: utils.nested_tensor_from_tensor_list([torch.arange(2), torch.arange(3)])
        ),
        "nested of a list of wide": attempt(
            lambda: utils.nested_tensor_from_tensor_list([torch.ones(2, 3), torch.ones(4, 3)])
        ),
        "nested of a list, last dim": attempt(
            lambda: utils.nested_tensor_from_tensor_list([torch.ones(3, 2), torch.ones(3, 4)])
        ),
        "nested of a list, asked": attempt(
            lambda: (
                utils.nested_tensor_from_tensor_list(
                    [torch.ones(3, 2), torch.ones(3, 4)], ragged_idx=2
                )._ragged_idx
            )
        ),
    }


def case_padding() -> Any:
    pad, unpad = utils.pad_to_divisor, utils.unpad
    data = mixed(3)
    return {
        "pad": attempt(lambda: pad(data, 2)),
        "pad larger": attempt(lambda: pad(utils.get_tensordict({"a": torch.arange(2), "b": ["x", "y"]}), 5)),
        "pad nothing": attempt(lambda: (lambda given: [given[1], given[0] is data])(pad(data, 3))),
        "pad zero": attempt(lambda: pad(data, 0)),
        "pad other": attempt(lambda: pad([1], 2)),
        "pad empty": attempt(lambda: pad(TensorDict({"a": torch.ones(0)}, [0]), 2)),
        "unpad": attempt(lambda: unpad(*pad(data, 2))),
        "unpad nothing": attempt(lambda: unpad(data, 0) is data),
    }


def case_iterating() -> Any:
    def batches(*arguments: Any, **keywords: Any) -> Any:
        return list(utils.make_iterator(mixed(4), *arguments, **keywords))

    return {
        "usual": attempt(lambda: batches(2, 1)),
        "epochs": attempt(lambda: len(batches(2, 3))),
        "seeded": attempt(lambda: batches(2, 1, seed=7, dataloader_kwargs={"shuffle": True})),
        "uneven": attempt(lambda: batches(3, 1)),
        "type": attempt(lambda: type(utils.make_iterator(mixed(4), 2, 1)).__name__),
    }


def case_comparing() -> Any:
    same = utils.assert_tensordict_eq
    of = utils.get_tensordict
    return {
        "equal": attempt(lambda: same(mixed(2), mixed(2))),
        "tensor": attempt(lambda: same(of({"a": torch.ones(2)}), of({"a": torch.zeros(2)}))),
        "shape": attempt(lambda: same(of({"a": torch.ones(2)}), of({"a": torch.ones(2, 1)}))),
        "rows": attempt(lambda: same(of({"a": torch.ones(2)}), of({"a": torch.ones(3)}))),
        "keys": attempt(lambda: same(of({"a": torch.ones(2)}), of({"b": torch.ones(2)}))),
        "stack": attempt(lambda: same(of({"a": ["x", "y"]}), of({"a": ["x", "z"]}))),
        "value": attempt(lambda: same(of({"a": ["x"]}, {"n": 1}), of({"a": ["x"]}, {"n": 2}))),
        "kinds": attempt(lambda: same(of({"a": ["x"]}), of({"a": torch.ones(1)}))),
        "nested": attempt(lambda: same(of({"a": jagged(1, 2)}), of({"a": jagged(2, 1)}))),
        "nested equal": attempt(lambda: same(of({"a": jagged(1, 2)}), of({"a": jagged(1, 2)}))),
        "nested rows": attempt(lambda: same(of({"a": jagged(1, 2)}), of({"a": jagged(1, 2, 3)}))),
        "nested and plain": attempt(
            lambda: same(of({"a": jagged(1, 1)}), of({"a": torch.zeros(2, 1, dtype=torch.int64)}))
        ),
        "dtype": attempt(
            lambda: same(of({"a": torch.ones(2)}), of({"a": torch.ones(2, dtype=torch.float64)}))
        ),
        "array value": attempt(
            lambda: same(of({"a": ["x"]}, {"n": np.ones(2)}), of({"a": ["x"]}, {"n": np.ones(2)}))
        ),
        "nan": attempt(
            lambda: same(of({"a": torch.tensor([float("nan")])}), of({"a": torch.tensor([float("nan")])}))
        ),
    }


def case_mending() -> Any:
    def fixed(data: Any) -> Any:
        given = utils.maybe_fix_3d_position_ids(data)
        held = data.get("position_ids", None)
        return [plain(given), None if held is None else getattr(held, "_ragged_idx", "no")]

    strided = TensorDict({"a": torch.arange(6).reshape(2, 3).t()}, [3])
    cut = TensorDict({"position_ids": position_ids(2, 4, 3)}, [3])
    return {
        "contiguous": attempt(lambda: [t.is_contiguous() for t in utils.contiguous(strided).values()]),
        "contiguous values": attempt(lambda: utils.contiguous(strided)),
        "contiguous mixed": attempt(lambda: utils.contiguous(mixed(2))),
        "contiguous itself": attempt(lambda: utils.contiguous(strided) is strided),
        "contiguous source": attempt(lambda: (utils.contiguous(strided), strided["a"].is_contiguous())[1]),
        "position ids": attempt(lambda: fixed(cut)),
        "flat position ids": attempt(lambda: fixed(TensorDict({"position_ids": jagged(2, 3)}, [2]))),
        "no position ids": attempt(lambda: fixed(TensorDict({"a": torch.ones(2)}, [2]))),
        "plain position ids": attempt(lambda: fixed(TensorDict({"position_ids": torch.ones(2, 3)}, [2]))),
        "indexed position ids": attempt(lambda: fixed(utils.index_select_tensor_dict(cut, [0, 1]))),
        "ragged dim by default": attempt(lambda: position_ids(2, 3)._ragged_idx),
    }
