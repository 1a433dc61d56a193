"""Signatures, dispatch functions and workers by themselves: what needs no cluster."""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch
from plain import attempt, load, plain
from tensordict import TensorDict

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")

decorator = load("single_controller.base.decorator")
worker_module = load("single_controller.base.worker")
group_module = load("single_controller.base.worker_group")
ray_base = load("single_controller.ray.base")
DataProto = load("protocol").DataProto
Dispatch, Execute, register = decorator.Dispatch, decorator.Execute, decorator.register

INTENDED = {
    "case_registry/names": "the Megatron modes of the earlier line are there, too",
    "case_registry/rank zero": "Dispatch.RANK_ZERO has functions (verl: KeyError)",
    "case_dispatch/tensordict*": "a TensorDict is split as a DataProto is",
    "case_dispatch/joined plain tensors": "refused as other outputs without rows are (an AssertionError)",
    "case_dispatch/padded caller": "the caller's batch is not padded",
    "case_worker/several meshes": "of several meshes the one of the same name is taken over",
    "case_worker/free address": "works outside of a group, too",
    "case_worker/node address": "works outside of a group, too",
}

Public = tuple[str, Any, tuple[str, ...]]


def _named() -> list[Public]:
    names: list[Public] = [
        ("decorator", decorator, ("register", "register_dispatch_mode", "update_dispatch_mode")),
        ("decorator", decorator, ("get_predefined_dispatch_fn", "get_predefined_execute_fn")),
        ("decorator", decorator, ("make_nd_compute_dataproto_dispatch_fn",)),
        ("worker", worker_module, ("DistRankInfo", "DistGlobalInfo", "Worker")),
        ("worker_group", group_module, ("ResourcePool", "ClassWithInitArgs", "WorkerGroup")),
        ("ray.base", ray_base, ("RayResourcePool", "SubRayResourcePool", "RayClassWithInitArgs")),
        ("ray.base", ray_base, ("RayWorkerGroup", "ResourcePoolManager", "merge_resource_pool")),
        ("ray.base", ray_base, ("split_resource_pool", "extract_pg_from_exist", "func_generator")),
        ("ray.base", ray_base, ("sort_placement_group_by_node_ip", "create_colocated_worker_cls")),
        ("ray.base", ray_base, ("create_colocated_worker_cls_fused", "create_colocated_worker_raw_cls")),
    ]
    return names


def _parameters(function: Any) -> list[str]:
    found = inspect.signature(function).parameters.values()
    return [f"{one.name}{'' if one.default is one.empty else '=' + _default(one.default)}" for one in found]


def _default(value: Any) -> str:
    return value if isinstance(value, str) else getattr(value, "name", None) or type(value).__name__


def case_signatures() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for place, module, names in _named():
        for name in names:
            found[f"{place}.{name}"] = attempt(
                lambda name=name, module=module: _parameters(getattr(module, name))
            )
    for name in ("add_node", "local_rank_list", "local_world_size_list"):
        found[f"ResourcePool.{name}"] = _parameters(getattr(group_module.ResourcePool, name))
    for name in (
        "from_detached",
        "spawn",
        "spawn_fused",
        "fuse",
        "execute_all",
        "execute_all_sync",
        "execute_all_async",
        "execute_rank_zero",
        "execute_rank_zero_sync",
        "execute_rank_zero_async",
        "start_worker_aliveness_check",
    ):
        found[f"RayWorkerGroup.{name}"] = _parameters(getattr(ray_base.RayWorkerGroup, name))
    for name in (
        "get_master_addr_port",
        "get_cuda_visible_devices",
        "get_fused_worker_by_name",
        "query_collect_info",
        "get_dispatch_collect",
        "set_dispatch_collect",
        "execute_with_func_generator",
        "execute_func_rank_zero",
        "_register_dispatch_collect_info",
    ):
        found[f"Worker.{name}"] = _parameters(getattr(worker_module.Worker, name))
    return found


def case_registry() -> dict[str, Any]:
    def add() -> Any:
        decorator.register_dispatch_mode("MINE", decorator.dispatch_all_to_all, decorator.collect_all_to_all)
        known = decorator.get_predefined_dispatch_fn(Dispatch.MINE)
        again = attempt(lambda: decorator.register_dispatch_mode("MINE", print, print))
        decorator.update_dispatch_mode(Dispatch.MINE, decorator.dispatch_one_to_all, print)
        changed = decorator.get_predefined_dispatch_fn(Dispatch.MINE)["collect_fn"] is print
        Dispatch.remove("MINE")
        return [sorted(known), again, changed, hasattr(Dispatch, "MINE")]

    return {
        "names": plain([mode.name for mode in Dispatch]),
        "values": [Dispatch.RANK_ZERO.value, Dispatch.DIRECT_ROLLOUT_METHOD.value, Execute.RANK_ZERO.value],
        "execute": plain([mode.name for mode in Execute]),
        "by name": attempt(lambda: Dispatch.from_name("one_to_all").name),
        "execute functions": plain([decorator.get_predefined_execute_fn(mode) for mode in Execute]),
        "no execute function": attempt(lambda: decorator.get_predefined_execute_fn(3)),
        "rank zero": attempt(lambda: sorted(decorator.get_predefined_dispatch_fn(Dispatch.RANK_ZERO))),
        "a mode of ones own": attempt(add),
        "update of none": attempt(lambda: decorator.update_dispatch_mode("NO", print, print)),
        "no mode": attempt(lambda: register(5)),
        "half a mode": attempt(lambda: register({"dispatch_fn": print})),
        "no execute mode": attempt(lambda: register(Dispatch.ONE_TO_ALL, execute_mode=3)),
        "magic": decorator.MAGIC_ATTR,
    }


def case_registered_method() -> dict[str, Any]:
    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def method(self: Any, x: int) -> int:
        "doc"
        return x

    @register(execute_mode=Execute.RANK_ZERO, materialize_futures=False)
    async def later(self: Any, x: int) -> int:
        return x

    def told(function: Any) -> list[Any]:
        how = getattr(function, decorator.MAGIC_ATTR)
        return [how["dispatch_mode"].name, how["execute_mode"].name, how["blocking"], sorted(how)]

    return {
        "plain": [method.__name__, method.__doc__, told(method), method(None, 3)],
        "async": [later.__name__, inspect.iscoroutinefunction(later), told(later)],
        "materialize": plain(decorator._materialize_futures(1, [2], a=3)),
    }


def case_dispatch() -> dict[str, Any]:
    group = group_module.WorkerGroup(group_module.ResourcePool([2]))
    group._workers = [None, None]
    data = DataProto.from_dict({"a": torch.arange(4)})
    odd = DataProto.from_dict({"a": torch.arange(3)}, auto_padding=True)
    tensors = TensorDict({"a": torch.arange(4)}, [4])

    def function(self: Any, given: Any) -> Any:
        return given

    def padded() -> Any:
        mine = odd[:]
        decorator.dispatch_dp_compute_data_proto(group, mine)
        return len(mine)

    split = decorator._split_args_kwargs_data_proto
    d = decorator
    return {
        "one to all": attempt(lambda: d.dispatch_one_to_all(group, 1, a=[2])),
        "all to all": attempt(lambda: d.dispatch_all_to_all(group, 1, a=[2])),
        "dp": attempt(lambda: d.dispatch_dp_compute(group, [1, 2], a=(3, 4))),
        "dp short": attempt(lambda: d.dispatch_dp_compute(group, [1])),
        "dp no list": attempt(lambda: d.dispatch_dp_compute(group, 5)),
        "dp collect": attempt(lambda: d.collect_dp_compute(group, [1, 2])),
        "dp collect short": attempt(lambda: d.collect_dp_compute(group, [1])),
        "rows": attempt(lambda: d.dispatch_dp_compute_data_proto(group, data)),
        "rows by name": attempt(lambda: d.dispatch_dp_compute_data_proto(group, x=data)),
        "rows of a number": attempt(lambda: d.dispatch_dp_compute_data_proto(group, 3)),
        "rows of a tensor": attempt(lambda: d.dispatch_dp_compute_data_proto(group, torch.zeros(4))),
        "rows uneven": attempt(lambda: d.dispatch_dp_compute_data_proto(group, data[:3])),
        "tensordict over ranks": attempt(lambda: d.dispatch_dp_compute_data_proto(group, tensors)),
        "split tensordict": attempt(lambda: split(2, tensors)),
        "split": attempt(lambda: split(2, data, b=data)),
        "padded": attempt(lambda: d._split_args_kwargs_data_proto_with_auto_padding(2, odd[:])),
        "padded by name": attempt(lambda: d._split_args_kwargs_data_proto_with_auto_padding(2, x=odd[:])),
        "padded caller": attempt(padded),
        "function": attempt(
            lambda: [[type(x).__name__ for x in one] for one in _with_function(group, function, data)]
        ),
        "no function": attempt(lambda: d.dispatch_dp_compute_data_proto_with_func(group, data)),
        "built-in function": attempt(lambda: d.dispatch_dp_compute_data_proto_with_func(group, len, data)),
        "joined": attempt(lambda: d.collect_dp_compute_data_proto(group, [data, data])),
        "joined tensordicts": attempt(lambda: d.collect_dp_compute_data_proto(group, [tensors, tensors])),
        "joined numbers": attempt(lambda: d.collect_dp_compute_data_proto(group, [1, 2])),
        "joined nothing": attempt(lambda: d._concat_data_proto_or_future([])),
        "joined plain tensors": attempt(lambda: d._concat_data_proto_or_future([torch.zeros(2)] * 2)),
        "masked": attempt(lambda: d.collect_nd_compute([True, False], group, [1, 2])),
        "masked rows": attempt(lambda: d.collect_nd_compute_dataproto([True, False], group, [data, data])),
        "mask too short": attempt(lambda: d.collect_nd_compute([True], group, [1, 2])),
        "direct": attempt(lambda: d.dummy_direct_rollout_call(group, 1)),
        "mode over a mesh": attempt(
            lambda: {name: one.args for name, one in d.make_nd_compute_dataproto_dispatch_fn("m").items()}
        ),
    }


def _with_function(group: Any, function: Any, data: Any) -> Any:
    return decorator.dispatch_dp_compute_data_proto_with_func(group, function, data)[0]


def case_worker() -> dict[str, Any]:
    Worker = worker_module.Worker
    one, other = Worker(), Worker()
    one._register_dispatch_collect_info("m", 3, False)

    def several() -> Any:
        third, fourth = Worker(), Worker()
        third._register_dispatch_collect_info("x", 1, True)
        third._register_dispatch_collect_info("y", 2, False)
        fourth.set_dispatch_collect("x", **third.get_dispatch_collect())
        return fourth.get_dispatch_collect()

    def configured() -> Any:
        fifth = Worker()
        fifth._configure_with_store({"_rank": 5, "_world_size": 7, "_other": 1})
        found = [fifth.rank, fifth.world_size, os.environ["RANK"], hasattr(fifth, "_other")]
        os.environ.update(RANK="0", WORLD_SIZE="1")
        return found

    def without_environment() -> Any:
        kept = os.environ.pop("WORLD_SIZE")
        try:
            return Worker()
        finally:
            os.environ["WORLD_SIZE"] = kept

    return {
        "attributes": sorted(vars(one)),
        "values": [one._rank, one._world_size, one._local_rank, one._master_addr, one._master_port],
        "again": attempt(lambda: one._register_dispatch_collect_info("m", 1, True)),
        "asked": [one._query_dispatch_info("m"), one._query_collect_info("m"), one.query_collect_info("m")],
        "not known": attempt(lambda: one._query_dispatch_info("z")),
        "not collected": attempt(lambda: one.query_collect_info("z")),
        "all": plain(one.get_dispatch_collect()),
        "taken over": attempt(
            lambda: [
                other.set_dispatch_collect("r", **one.get_dispatch_collect()),
                other.get_dispatch_collect(),
            ]
        ),
        "taken over again": attempt(lambda: other.set_dispatch_collect("r", {"m": 1}, {"m": True})),
        "taken over nothing": attempt(lambda: other.set_dispatch_collect("q", {}, {})),
        "several meshes": attempt(several),
        "configured": attempt(configured),
        "keys": sorted(Worker.env_keys()),
        "devices": one.get_cuda_visible_devices(),
        "meeting point": plain(one.get_master_addr_port()),
        "free address": attempt(lambda: type(one.get_available_master_addr_port()[1]).__name__),
        "node address": attempt(lambda: type(Worker._get_node_ip()).__name__),
        "free port": type(Worker._get_free_port()).__name__,
        "no role": one.get_fused_worker_by_name("a"),
        "function with worker": attempt(
            lambda: one.execute_with_func_generator(lambda self, *a, **k: [type(self).__name__, a, k], 1, b=2)
        ),
        "function": attempt(lambda: one.execute_func_rank_zero(lambda *a, **k: [a, k], 1, b=2)),
        "no environment": attempt(without_environment),
        "infos": [
            repr(worker_module.DistRankInfo(1, 2, 3, 4)),
            repr(worker_module.DistGlobalInfo(1, 2, 3, 4)),
        ],
    }


def case_pools_alone() -> dict[str, Any]:
    pool = group_module.ResourcePool([2, 3], max_colocate_count=4)
    before = plain(vars(pool))
    pool.add_node(1)
    ray_pool = ray_base.RayResourcePool([2], use_gpu=False, name_prefix="p")
    made = group_module.ClassWithInitArgs(dict, a=1)
    cls = ray_base.RayClassWithInitArgs(dict, a=1)
    cls.set_additional_resource({"x": 1})
    cls.update_options({"num_cpus": 2})
    return {
        "empty": plain(vars(group_module.ResourcePool())),
        "given": before,
        "grown": [pool.world_size, pool.store, pool(), pool.local_world_size_list(), pool.local_rank_list()],
        "ray": plain(vars(ray_pool)),
        "random prefix": len(ray_base.RayResourcePool([1]).name_prefix),
        "class": plain(vars(made)),
        "called": made(),
        "ray class": plain(vars(cls)),
        "group": plain(vars(group_module.WorkerGroup(group_module.ResourcePool([2])))),
    }
