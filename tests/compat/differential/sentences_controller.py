"""What `single_controller` refuses without a cluster, in verl's own words."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ray
from batches import DataProto
from plain import load
from sentence import Sentence
from torch import arange

decorator = load("single_controller.base.decorator")
worker_module = load("single_controller.base.worker")
group_module = load("single_controller.base.worker_group")
ray_base = load("single_controller.ray.base")

WorkerGroup = group_module.WorkerGroup
DECLARED = {
    "dispatch_mode": decorator.Dispatch.ONE_TO_ALL,
    "execute_mode": decorator.Execute.ALL,
    "blocking": True,
}
RANK_0 = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WG_BACKEND": "ray"}
Plain = type("Plain", (), {"__module__": "example"})
NamedWorker = type("Worker", (), {"__module__": "example"})


def group(ranks: int) -> Any:
    made = WorkerGroup(None)
    made._workers = [None] * ranks
    return made


def padded(count: int) -> Any:
    return DataProto.from_dict({"obs": arange(count)}, auto_padding=True)


def worker(*meshes: str) -> Any:
    with mock.patch.dict(os.environ, RANK_0):
        made = worker_module.Worker()
    for mesh in meshes:
        made._register_dispatch_collect_info(mesh, 0, True)
    return made


def registered_as(attributes: Any, name: str = "step") -> type:
    def step(self: Any) -> None: ...

    setattr(step, decorator.MAGIC_ATTR, attributes)
    return type("Mine", (), {name: step, "__module__": "example"})


def bind(cls: type, **methods: Any) -> Any:
    """Bind a class's methods to a group of a backend that executes nothing, or not even has ``methods``."""
    held = {"execute_all": print, "execute_rank_zero": print, **methods}
    return type("Group", (WorkerGroup,), held)(None)._bind_worker_method(cls, lambda *args, **kwargs: print)


def bound(cls: type) -> Any:
    return ray_base.RayClassWithInitArgs(ray.remote(cls))


def bind_two_rollouts() -> None:
    class Rollout(worker_module.Worker):
        @decorator.register(decorator.Dispatch.DIRECT_ROLLOUT_METHOD)
        def generate(self) -> None: ...

    parent = type("WorkerDict", (worker_module.Worker,), {})
    for role in ("rollout", "ref_rollout"):
        ray_base._bind_workers_method_to_parent(parent, role, Rollout)


def fused(role: str) -> Any:
    mine = type("Mine", (worker_module.Worker,), {})
    with mock.patch.dict(os.environ, RANK_0):
        return ray_base.create_colocated_worker_raw_cls({role: bound(mine)})()


def pool(sizes: list[int], **options: Any) -> Any:
    return ray_base.RayResourcePool(sizes, name_prefix="p", **options)


def of_nodes(gpus: int) -> Any:
    made = pool([1])
    made.n_gpus_per_node = gpus
    return made


def held(*counts: int) -> Any:
    made = pool(list(counts))
    made.pgs = [SimpleNamespace(bundle_count=count, id=index) for index, count in enumerate(counts)]
    return made


SENTENCES = [
    Sentence(
        "utils.py_functional:DynamicEnum.register",
        lambda: decorator.register_dispatch_mode("ONE_TO_ALL", print, print),
        ValueError,
        "ONE_TO_ALL already registered",
    ),
    Sentence(
        "single_controller.base.decorator:_split_args_kwargs_data_proto",
        lambda: decorator._split_args_kwargs_data_proto(2, 5),
        AssertionError,
        "arg of type <class 'int'> is not chunkable",
    ),
    Sentence(
        "single_controller.base.decorator:_split_args_kwargs_data_proto",
        lambda: decorator._split_args_kwargs_data_proto(2, n=5),
        AssertionError,
        "kwarg 'n' of type <class 'int'> is not chunkable",
    ),
    Sentence(
        "single_controller.base.decorator:_split_args_kwargs_data_proto_with_auto_padding._padding_and_split_data",
        lambda: decorator._split_args_kwargs_data_proto_with_auto_padding(2, padded(2), padded(3)),
        AssertionError,
        "expecting all arg share same length of 2, but got 3",
    ),
    Sentence(
        "single_controller.base.decorator:_split_args_kwargs_data_proto_with_auto_padding._padding_and_split_data",
        lambda: decorator._split_args_kwargs_data_proto_with_auto_padding(2, padded(4), key=padded(5)),
        AssertionError,
        "expecting all arg share same length of 4, but got 5",
    ),
    Sentence(
        "single_controller.base.decorator:dummy_direct_rollout_call",
        lambda: decorator.dummy_direct_rollout_call(group(2)),
        NotImplementedError,
        "Direct rollout call is forbidden.",
    ),
    Sentence(
        "single_controller.base.decorator:collect_dp_compute_data_proto",
        lambda: decorator.collect_dp_compute_data_proto(group(2), [1, 2]),
        AssertionError,
        "expecting concatable output, but got element type <class 'int'>",
    ),
    Sentence(
        "single_controller.base.decorator:collect_dp_compute_data_proto",
        lambda: decorator.collect_dp_compute_data_proto(group(2), []),
        AssertionError,
        "expecting concatable output, but got element type empty",
    ),
    Sentence(
        "single_controller.base.decorator:collect_nd_compute_dataproto",
        lambda: decorator.collect_nd_compute_dataproto([True, True], group(2), ["a", 2]),
        AssertionError,
        "expecting concatable output, but got element type <class 'str'>",
    ),
    Sentence(
        "single_controller.base.decorator:collect_nd_compute_dataproto",
        lambda: decorator.collect_nd_compute_dataproto([False, False], group(2), [1, 2]),
        AssertionError,
        "expecting concatable output, but got element type empty",
    ),
    Sentence(
        "single_controller.base.decorator:update_dispatch_mode",
        lambda: decorator.update_dispatch_mode(decorator.Dispatch("UNLISTED", 99), print, print),
        AssertionError,
        "dispatch_mode <Dispatch.UNLISTED: 99> not found",
    ),
    Sentence(
        "single_controller.base.decorator:_check_dispatch_mode",
        lambda: decorator.register(dispatch_mode="ONE_TO_ALL"),
        AssertionError,
        "dispatch_mode must be a Dispatch or a Dict. Got ONE_TO_ALL",
    ),
    Sentence(
        "single_controller.base.decorator:_check_dispatch_mode",
        lambda: decorator.register(dispatch_mode={"dispatch_fn": print}),
        AssertionError,
        "key collect_fn should be in dispatch_mode if it is a dictionary",
    ),
    Sentence(
        "single_controller.base.decorator:_check_dispatch_mode",
        lambda: decorator.register(dispatch_mode={"collect_fn": print}),
        AssertionError,
        "key dispatch_fn should be in dispatch_mode if it is a dictionary",
    ),
    Sentence(
        "single_controller.base.decorator:_check_execute_mode",
        lambda: decorator.register(execute_mode="ALL"),
        AssertionError,
        "execute_mode must be a Execute. Got ALL",
    ),
    Sentence(
        "single_controller.base.worker:Worker._register_dispatch_collect_info",
        lambda: worker("actor")._register_dispatch_collect_info("actor", 0, True),
        ValueError,
        "mesh_name actor has been registered",
    ),
    Sentence(
        "single_controller.base.worker:Worker._query_dispatch_info",
        lambda: worker()._query_dispatch_info("infer"),
        AssertionError,
        "infer is not registered in Worker",
    ),
    Sentence(
        "single_controller.base.worker:Worker.query_collect_info",
        lambda: worker().query_collect_info("infer"),
        AssertionError,
        "infer is not registered in Worker",
    ),
    Sentence(
        "single_controller.base.worker:Worker.set_dispatch_collect",
        lambda: worker("actor").set_dispatch_collect("actor", {"a": 0}, {"a": True}),
        AssertionError,
        "actor is already registered, dict_keys(['actor'])",
    ),
    Sentence(
        "single_controller.base.worker_group:WorkerGroup._is_worker_alive",
        lambda: WorkerGroup(None)._is_worker_alive(None),
        NotImplementedError,
        "WorkerGroup._is_worker_alive called, should be implemented in derived class.",
    ),
    Sentence(
        "single_controller.base.worker_group:WorkerGroup._bind_worker_method",
        lambda: bind(registered_as(3)),
        AssertionError,
        "attribute must be a dictionary. Got <class 'int'>",
    ),
    Sentence(
        "single_controller.base.worker_group:WorkerGroup._bind_worker_method",
        lambda: bind(registered_as({"blocking": True})),
        AssertionError,
        "attribute must contain dispatch_mode in its key",
    ),
    Sentence(
        "single_controller.base.worker_group:WorkerGroup._bind_worker_method",
        lambda: bind(registered_as(DECLARED, name="world_size")),
        ValueError,
        "Fail to set method_name world_size",
    ),
    Sentence(
        "single_controller.base.worker_group:WorkerGroup._bind_worker_method",
        lambda: bind(registered_as(DECLARED), execute_all=None),
        AssertionError,
        "execute_fn must be callable",
    ),
    Sentence(
        "single_controller.ray.base:get_master_addr_port",
        lambda: ray_base.get_master_addr_port._function([5, 5]),
        RuntimeError,
        "Could not find a free port in range [5, 5]",
    ),
    Sentence(
        "single_controller.ray.base:extract_pg_from_exist",
        lambda: ray_base.extract_pg_from_exist({"a": held(4)}, ["a"], pool([1, 1])),
        AssertionError,
        "no enough nodes for request: searching 1 th node",
    ),
    Sentence(
        "single_controller.ray.base:extract_pg_from_exist",
        lambda: ray_base.extract_pg_from_exist({"a": held(4)}, ["a"], pool([5])),
        AssertionError,
        "requesting 5 processes, bundle count cannot satisfy",
    ),
    Sentence(
        "single_controller.ray.base:split_resource_pool",
        lambda: ray_base.split_resource_pool(pool([4]), 3),
        AssertionError,
        "split_size must be a divisor of world_size",
    ),
    Sentence(
        "single_controller.ray.base:split_resource_pool",
        lambda: ray_base.split_resource_pool(pool([4]), [1, 2]),
        AssertionError,
        "split_size must sum up to world_size",
    ),
    Sentence(
        "single_controller.ray.base:merge_resource_pool",
        lambda: ray_base.merge_resource_pool(pool([1]), pool([1], use_gpu=False)),
        AssertionError,
        "Both RayResourcePool must either use_gpu or not",
    ),
    Sentence(
        "single_controller.ray.base:merge_resource_pool",
        lambda: ray_base.merge_resource_pool(pool([1]), pool([1], max_colocate_count=3)),
        AssertionError,
        "Both RayResourcePool must has the same max_colocate_count",
    ),
    Sentence(
        "single_controller.ray.base:merge_resource_pool",
        lambda: ray_base.merge_resource_pool(pool([1]), of_nodes(4)),
        AssertionError,
        "Both RayResourcePool must has the same n_gpus_per_node",
    ),
    Sentence(
        "single_controller.ray.base:merge_resource_pool",
        lambda: ray_base.merge_resource_pool(pool([1]), pool([1], detached=True)),
        AssertionError,
        "Detached ResourcePool cannot be merged with non-detached ResourcePool",
    ),
    Sentence(
        "single_controller.ray.base:_bind_workers_method_to_parent",
        lambda: bind_two_rollouts(),
        ValueError,
        "Fail to set method_name generate",
    ),
    Sentence(
        "single_controller.ray.base:_determine_fsdp_megatron_base_class",
        lambda: ray_base._determine_fsdp_megatron_base_class([Plain.__mro__]),
        ValueError,
        "Cannot determine base class for [(<class 'example.Plain'>, <class 'object'>)]",
    ),
    Sentence(
        "single_controller.ray.base:create_colocated_worker_cls",
        lambda: ray_base.create_colocated_worker_cls({"actor": bound(NamedWorker)}),
        AssertionError,
        "worker_cls <class 'example.Worker'> should be a subclass of Worker",
    ),
    Sentence(
        "single_controller.ray.base:create_colocated_worker_raw_cls.FusedWorker._fuw_execute",
        lambda: fused("actor")._fuw_execute("critic_fwmn_step"),
        AssertionError,
        "calling critic's step, but critic not in fused_worker_dict",
    ),
    Sentence(
        "utils.py_functional:DynamicEnum.register",
        lambda: decorator.Execute.register("all"),
        ValueError,
        "ALL already registered",
    ),
]
