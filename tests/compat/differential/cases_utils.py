"""The smaller helpers, on a machine without accelerators: one function per module."""

from __future__ import annotations

import asyncio
import os
import pickle
from typing import Any

import torch
from plain import attempt, load, plain
from tensordict import TensorDict

functional = load("utils.py_functional")
device = load("utils.device")
ray_utils = load("utils.ray_utils")
balancing = load("utils.seqlen_balancing")
bridge = load("utils.transferqueue_utils")


DEVICE = "the device of a machine without accelerators is its CPU"
INTENDED = {
    "case_dicts/append to a value": "refused with a message (an AssertionError)",
    "case_regular_types/config": "configurations inside lists are converted, too",
    "case_device/get_*": DEVICE,
    "case_device/torch device": DEVICE,
    "case_device/vendor": DEVICE,
}


def case_dicts() -> Any:
    union, append = functional.union_two_dict, functional.append_to_dict

    def appended(start: Any, *more: Any) -> Any:
        given = [append(start, data) for data in more]
        return [given, start]

    def unioned() -> Any:
        one, two = {"a": 1}, {"b": 2}
        given = union(one, two)
        return [given is one, given, one, two]

    return {
        "union": attempt(unioned),
        "union equal": attempt(lambda: union({"a": [1]}, {"a": [1]})),
        "union clash": attempt(lambda: union({"a": 1}, {"a": 2})),
        "union nothing": attempt(lambda: union({}, {})),
        "union kinds": attempt(lambda: union({"a": 1}, {"a": 1.0})),
        "append": attempt(lambda: appended({}, {"a": 1}, {"a": 2, "b": 3})),
        "append lists": attempt(lambda: appended({}, {"a": [1, 2]}, {"a": [3]}, {"a": 4})),
        "append with prefix": attempt(lambda: (lambda d: (append(d, {"a": 1}, prefix="actor/"), d))({})),
        "append to a value": attempt(lambda: appended({"a": 1}, {"a": 2})),
        "append none": attempt(lambda: appended({}, {"a": None})),
        "append a dict": attempt(lambda: appended({}, {"a": {"x": 1}})),
        "append a tuple": attempt(lambda: appended({}, {"a": (1, 2)})),
        "append a tensor": attempt(lambda: appended({}, {"a": torch.ones(2)})),
        "rename": attempt(lambda: functional.rename_dict({"a": 1, "b": {"c": 2}}, "x/")),
        "rename without prefix": attempt(lambda: functional.rename_dict({"a": 1})),
        "lists": attempt(lambda: functional.list_of_dict_to_dict_of_list([{"a": 1}, {"a": 2}])),
        "no lists": attempt(lambda: functional.list_of_dict_to_dict_of_list([])),
        "unlike lists": attempt(lambda: functional.list_of_dict_to_dict_of_list([{"a": 1}, {"b": 2}])),
        "shrinking lists": attempt(
            lambda: functional.list_of_dict_to_dict_of_list([{"a": 1, "b": 1}, {"b": 2}])
        ),
    }


def case_environment() -> Any:
    def inside(key: str, value: Any) -> Any:
        with functional.temp_env_var(key, value):
            found = os.environ.get(key)
        return [found, os.environ.get(key)]

    def kept() -> Any:
        os.environ["PX_COMPAT_B"] = "before"
        return [inside("PX_COMPAT_B", "now"), os.environ.pop("PX_COMPAT_B")]

    def raised() -> Any:
        try:
            with functional.temp_env_var("PX_COMPAT_C", "1"):
                raise KeyError
        except KeyError:
            return os.environ.get("PX_COMPAT_C")

    return {
        "set": attempt(lambda: inside("PX_COMPAT_A", "1")),
        "restored": attempt(kept),
        "restored after an error": attempt(raised),
        "not a string": attempt(lambda: inside("PX_COMPAT_D", 1)),
    }


def case_dynamic_enum() -> Any:
    class Colour(functional.DynamicEnum):
        _registry: dict[str, Any] = {}
        _next_value = 0

    red = Colour.register("red")
    blue = Colour.register("BLUE")

    def without_blue() -> Any:
        gone = Colour.remove("blue")
        return [
            gone is blue,
            list(Colour.names()),
            attempt(lambda: Colour.BLUE),
            attempt(lambda: Colour.register("green").value),
        ]

    return {
        "name": [red.name, red.value, blue.name, blue.value],
        "attribute": Colour.RED is red,
        "subscript": attempt(lambda: Colour["RED"] is red),
        "lower subscript": attempt(lambda: Colour["red"] is red),
        "unknown subscript": attempt(lambda: Colour["nope"]),
        "from name": attempt(
            lambda: [
                Colour.from_name("red") is red,
                Colour.from_name("BLUE") is blue,
                Colour.from_name("nope"),
            ]
        ),
        "names": attempt(lambda: list(Colour.names())),
        "names kind": attempt(lambda: type(Colour.names()).__name__),
        "values": attempt(lambda: [member.name for member in Colour.values()]),
        "values kind": attempt(lambda: type(Colour.values()).__name__),
        "iteration": attempt(lambda: [member.name for member in Colour]),
        "contains": attempt(lambda: [red in Colour, "RED" in Colour, "red" in Colour, 3 in Colour]),
        "register twice": attempt(lambda: Colour.register("RED")),
        "repr": repr(red),
        "str": str(red),
        "hash": attempt(lambda: len({red, blue, red})),
        "equal": [red == blue, red == Colour.RED],
        "length": attempt(lambda: len(Colour)),
        "remove": attempt(without_blue),
        "remove unknown": attempt(lambda: Colour.remove("nope")),
        "module level pickles": attempt(pickled),
    }


class Shape(functional.DynamicEnum):
    """Of this module, so that it can be pickled."""

    _registry: dict[str, Any] = {}
    _next_value = 0


def pickled() -> Any:
    Shape.register("ROUND")
    back = pickle.loads(pickle.dumps(Shape.ROUND))
    return [back is Shape.ROUND, back.name]


def case_regular_types() -> Any:
    from omegaconf import OmegaConf

    made = functional.convert_to_regular_types(OmegaConf.create({"a": [1, {"b": 2}]}))
    space = functional.NestedNamespace({"a": 1, "b": {"c": 2}})
    return {
        "config": [plain(made), type(made).__name__, type(made["a"]).__name__],
        "mixed": attempt(
            lambda: functional.convert_to_regular_types({"a": OmegaConf.create([1]), "b": (1, 2)})
        ),
        "namespace": attempt(lambda: [space.a, space.b.c]),
    }


def case_device() -> Any:
    names = (
        "get_device_name",
        "get_device_id",
        "get_nccl_backend",
        "get_visible_devices_keyword",
        "get_resource_name",
    )
    found = {name: attempt(getattr(device, name)) for name in names}
    return {
        **found,
        "torch device": attempt(lambda: device.get_torch_device().__name__),
        "cuda": device.is_cuda_available,
        "npu": device.is_npu_available,
        "npu function": attempt(lambda: device.is_torch_npu_available()),
        "npu function, unchecked": attempt(lambda: device.is_torch_npu_available(check_device=False)),
        "vendor": attempt(device.get_vendor),
        "available": attempt(device.is_device_available),
        "capability": attempt(device.get_device_capability),
        "seeds": attempt(lambda: [device.manual_seed(1), device.manual_seed_all(1)]),
    }


def case_ray_helpers() -> Any:
    keys = (
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
        "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
        "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES",
        "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES",
        "RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS",
        "NEURON",
        "RAY_EXPERIMENTAL_NOSET_OTHER",
    )
    noset = ray_utils.ray_noset_visible_devices

    @ray_utils.auto_await
    async def doubled(x: int) -> int:
        await asyncio.sleep(0)
        return 2 * x

    @ray_utils.auto_await
    def tripled(x: int) -> int:
        return 3 * x

    async def outer() -> Any:
        given = doubled(4)
        return [type(given).__name__, await given]

    return {
        "noset": {key: attempt(lambda key=key: noset({key: "1"})) for key in keys},
        "noset empty": attempt(lambda: [noset({}), noset({keys[0]: ""}), noset({keys[0]: "0"})]),
        "awaited": attempt(lambda: doubled(3)),
        "in a loop": attempt(lambda: asyncio.run(outer())),
        "plain function": attempt(lambda: tripled(3)),
        "named": doubled.__name__,
        "loop": attempt(
            lambda: [
                ray_utils.get_event_loop().is_closed(),
                ray_utils.get_event_loop() is ray_utils.get_event_loop(),
            ]
        ),
    }


def case_balancing() -> Any:
    balance = balancing.get_seqlen_balanced_partitions

    def sums(lengths: list[int], parts: int, equal: bool) -> Any:
        found = balance(lengths, parts, equal_size=equal)
        whole = sorted(i for part in found for i in part)
        ordered = all(list(part) == sorted(part) for part in found)
        return [
            whole,
            ordered,
            type(found).__name__,
            sorted(len(p) for p in found) if equal else None,
            max(sum(lengths[i] for i in p) for p in found),
        ]

    return {
        "usual": attempt(lambda: sums([8, 7, 6, 5, 4, 3, 2, 1], 2, False)),
        "equal": attempt(lambda: sums([8, 7, 6, 5, 4, 3, 2, 1], 4, True)),
        "one part": attempt(lambda: balance([3, 1, 2], 1, equal_size=True)),
        "as many as rows": attempt(lambda: sums([3, 1, 2], 3, False)),
        "fewer rows": attempt(lambda: balance([1, 2], 3, equal_size=False)),
        "equal, uneven": attempt(lambda: balance([1, 2, 3], 2, equal_size=True)),
        "zeros": attempt(lambda: sums([0, 0, 0, 0], 2, False)),
        "even lengths": attempt(lambda: sums([4] * 6, 3, True)),
        "positional": attempt(lambda: sums([5, 1], 2, True)),
        "one long": attempt(lambda: sums([100, 1, 1, 1], 2, True)),
    }


def case_micro_batches() -> Any:
    """Which rows are together is each library's own choice: that the limits are kept, and the rows are all there."""

    def rows(lengths: list[int]) -> Any:
        mask = (torch.arange(8)[None] < torch.tensor(lengths)[:, None]).long()
        data = {"attention_mask": mask, "input_ids": mask.clone(), "row": torch.arange(len(lengths))}
        return TensorDict(data, [len(lengths)])

    def cut(lengths: list[int], most: int, **options: Any) -> Any:
        parts, numbers = balancing.rearrange_micro_batches(rows(lengths), most, **options)
        tokens = [int(part["attention_mask"].sum()) for part in parts]
        same = [part["row"].tolist() for part in parts] == [list(part) for part in numbers]
        whole = sorted(row for part in numbers for row in part)
        return [len(parts), max(tokens) <= most, same, whole, type(parts[0]).__name__]

    def restored() -> Any:
        data = load("protocol").DataProto.from_dict(dict(rows([8, 1, 5, 3]).items()), meta_info={"m": 1})
        parts, numbers = balancing.prepare_dynamic_batch(data, 10)
        joined = torch.cat([part.batch["row"] for part in parts])
        return [balancing.restore_dynamic_batch(joined, numbers), [part.meta_info for part in parts]]

    nested = torch.nested.as_nested_tensor([torch.arange(n) for n in (3, 1, 2)], layout=torch.jagged)
    lengths = [8, 1, 5, 3, 2, 7]
    return {
        "usual": attempt(lambda: cut(lengths, 12)),
        "multiple": attempt(lambda: cut(lengths, 12, num_batches_divided_by=4)),
        "at least": attempt(lambda: cut(lengths, 26, min_num_micro_batch=2)),
        "too many": attempt(lambda: cut(lengths, 12, min_num_micro_batch=99)),
        "groups": attempt(lambda: cut(lengths, 12, force_group_size=2)),
        "unsorted": attempt(lambda: cut(lengths, 12, use_dynamic_bsz_balance=False)),
        "too short": attempt(lambda: cut(lengths, 7)),
        "tight": attempt(lambda: cut([8, 1, 8, 1, 8, 1], 8)),
        "restored": attempt(restored),
        "restored nested": attempt(lambda: balancing.restore_dynamic_batch(nested, [[2, 0], [1]])),
        "rounding": [balancing.ceildiv(7, 2), balancing.ceildiv(6, 2), balancing.roundup_divisible(7, 4)],
        "inverse": balancing.get_reverse_idx([2, 0, 1]),
        "work": attempt(lambda: balancing.calculate_workload(torch.tensor([1, 10]))),
        "told": attempt(lambda: balancing.log_seqlen_unbalance([8, 1, 5, 3], [[0, 1], [2, 3]], "p")),
    }


def case_bridge() -> Any:
    @bridge.tqbridge()
    def plus(x: int) -> int:
        return x + 1

    @bridge.tqbridge()
    async def later(x: int) -> int:
        return x + 2

    return {
        "classes": [bridge.BatchMeta.__name__, bridge.KVBatchMeta.__name__],
        "function": attempt(lambda: plus(1)),
        "coroutine": attempt(lambda: asyncio.run(later(1))),
        "name": plus.__name__,
        "is coroutine function": asyncio.iscoroutinefunction(later),
    }
