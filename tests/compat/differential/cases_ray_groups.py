"""Groups on a local Ray cluster with logical accelerators."""

from __future__ import annotations

import os
from typing import Any

import ray
import torch
from plain import attempt, load, plain
from ray.util.placement_group import placement_group_table
from sentence import Sentence

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

Worker = load("single_controller.base").Worker
decorator = load("single_controller.base.decorator")
ray_base = load("single_controller.ray.base")
DataProto = load("protocol").DataProto
Dispatch, Execute, register = decorator.Dispatch, decorator.Execute, decorator.register
Pool, Group, Cls = ray_base.RayResourcePool, ray_base.RayWorkerGroup, ray_base.RayClassWithInitArgs

INTENDED = {
    "case_basics/attributes": "two more attributes: the role that it stands for, and its connection",
    "case_basics/padded later": "padding is removed where the caller does not wait, too",
    "case_basics/padded metric": "a list by rank is not shortened with the padding",
    "case_basics/custom caller": "the caller's lists are not changed",
    "case_basics/environment": "RAY_LOCAL_RANK is set; torch's thread count is the node's cores by rank",
    "case_chains/odd": "a future is cut into uneven pieces where its rows do not divide",
    "case_chains/async *": "futures of a group with async methods are arguments of its next call without a deadlock",
    "case_colocated/role by name": "a role's methods can be called by their own names",
    "case_colocated/async of a fused role": "an async method of a fused role gives its value",
    "case_pools/uneven": "uneven pools work",
    "case_pools/meeting point given": "master_addr and master_port are honoured",
    "case_pools/sub local sizes": "the true number of ranks beside this one",
    "case_pools/bundles": "a slot asks for as little CPU as it can",
    "case_pools/accelerator type": "accelerator_type survives a merge",
}


def two_to_all(worker_group: Any, *args: Any, **kwargs: Any) -> Any:
    for values in [*args, *kwargs.values()]:
        values.extend(values[i % 2] for i in range(worker_group.world_size - 2))
    return args, kwargs


@ray.remote
class Toy(Worker):
    def __init__(self, x: int = 0) -> None:
        super().__init__()
        self.x = x

    def plain(self, a: Any = None) -> Any:
        return [self.rank, a]

    @register(Dispatch.ONE_TO_ALL)
    def add(self, y: int) -> int:
        return self.x + y + self.rank

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def later(self, y: int) -> int:
        return y + self.rank

    @register()
    def default(self, v: Any) -> Any:
        return v

    @register(Dispatch.DP_COMPUTE)
    def dealt(self, a: Any, b: Any = None) -> Any:
        return [a, b]

    @register(Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def zero(self, a: Any, b: Any = None) -> Any:
        return [self.rank, a, b]

    @register({"dispatch_fn": two_to_all, "collect_fn": decorator.collect_all_to_all})
    def custom(self, x: int, y: int) -> int:
        return self.x + y + x

    @register(Dispatch.DP_COMPUTE_PROTO)
    def rows(self, data: Any) -> Any:
        data.batch["a"] += self.rank
        return data

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def rows_later(self, data: Any) -> Any:
        data.batch["a"] += self.rank
        return data

    @register(Dispatch.DP_COMPUTE_METRIC)
    def count(self, data: Any) -> int:
        return len(data)

    @register(Dispatch.DIRECT_ROLLOUT_METHOD)
    def direct(self, a: int) -> int:
        return a

    @register(Dispatch.ONE_TO_ALL)
    async def soon(self, y: int) -> int:
        return y

    @register(Dispatch.ONE_TO_ALL)
    def fail(self) -> int:
        if self.rank == 1:
            raise ValueError("as told")
        return 1

    @register(Dispatch.ONE_TO_ALL)
    def environment(self) -> dict[str, str | None]:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WG_PREFIX", "WG_BACKEND")
        names += ("RAY_LOCAL_RANK", "RAY_LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
        return {name: os.environ.get(name) for name in names}

    @register(Dispatch.ONE_TO_ALL)
    def peers(self) -> list[str]:
        return sorted(self.fused_worker_dict)


def cluster() -> None:
    if not ray.is_initialized():
        ray.init(
            num_cpus=400,
            num_gpus=8,
            include_dashboard=False,
            logging_level=40,
            log_to_driver=False,
            namespace="c",
        )


def ended(group: Any) -> None:
    for worker in group.workers:
        ray.kill(worker)


def batch(rows: int, **options: Any) -> Any:
    return DataProto.from_dict({"a": torch.zeros(rows)}, **options)


def case_basics() -> dict[str, Any]:
    cluster()
    group = Group(Pool([2], use_gpu=False), Cls(Toy, x=3), name_prefix="pre")

    def custom_caller() -> Any:
        wide = Group.from_detached(worker_handles=group.workers * 2, ray_cls_with_init=Cls(Toy))
        given = [1, 2]
        return [wide.custom(given, [5, 6]), given]

    found = {
        "names": plain(group.worker_names),
        "attributes": sorted(name for name in vars(group) if not callable(getattr(group, name))),
        "methods": sorted(name for name in vars(group) if callable(getattr(group, name))),
        "environment": attempt(group.environment),
        "add": attempt(lambda: group.add(1)),
        "later": attempt(lambda: [type(ref).__name__ for ref in group.later(1)]),
        "later got": attempt(lambda: ray.get(group.later(1))),
        "default dealt": attempt(lambda: group.default([1, 2])),
        "default one": attempt(lambda: group.default(7)),
        "default three": attempt(lambda: group.default([1, 2, 3])),
        "dealt": attempt(lambda: group.dealt([1, 2], b=[3, 4])),
        "dealt tuple": attempt(lambda: group.dealt((1, 2))),
        "dealt short": attempt(lambda: group.dealt([1])),
        "zero": attempt(lambda: group.zero([1, 2], b=3)),
        "custom caller": attempt(custom_caller),
        "rows": attempt(lambda: group.rows(batch(4))),
        "rows odd": attempt(lambda: group.rows(batch(3))),
        "rows later": attempt(lambda: type(group.rows_later(batch(4))).__name__),
        "rows later got": attempt(lambda: group.rows_later(batch(4)).get()),
        "padded": attempt(lambda: group.rows(batch(3, auto_padding=True)).batch["a"]),
        "padded later": attempt(lambda: group.rows_later(batch(3, auto_padding=True)).get().batch["a"]),
        "padded metric": attempt(lambda: group.count(batch(3, auto_padding=True))),
        "direct": attempt(lambda: group.direct(1)),
        "soon": attempt(lambda: group.soon(3)),
        "fail": attempt(group.fail),
        "fail later": attempt(lambda: ray.get(group.execute_all_async("fail"))),
        "all": attempt(lambda: group.execute_all_sync("plain", 1)),
        "all dealt": attempt(lambda: group.execute_all_sync("plain", [1, 2])),
        "all three": attempt(lambda: group.execute_all_sync("plain", [1, 2, 3])),
        "all tuple": attempt(lambda: group.execute_all_sync("plain", (1, 2))),
        "rank zero": attempt(lambda: group.execute_rank_zero_sync("plain", [1, 2])),
        "rank zero later": attempt(lambda: type(group.execute_rank_zero("plain", 1)).__name__),
        "nowhere": attempt(lambda: group.execute_all_sync("nowhere")),
        "not registered": attempt(lambda: group.plain),
        "handle": attempt(lambda: ray.get(group.workers[1].plain.remote(4))),
        "function": attempt(lambda: group.execute_func_rank_zero(lambda a, b=1: [a, b], 3, b=4)),
        "by name": attempt(
            lambda: Group.from_detached(worker_names=group.worker_names, ray_cls_with_init=Cls(Toy)).add(1)
        ),
        "no such name": attempt(lambda: Group(worker_names=["nobody"], ray_cls_with_init=Cls(Toy))),
        "sizes": [group.world_size, type(group.master_port).__name__],
    }
    ended(group)
    return found


@ray.remote
class Chained(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def rows_later(self, data: Any) -> Any:
        data.batch["a"] += self.rank
        return data

    @register(Dispatch.DP_COMPUTE_PROTO)
    def rows(self, data: Any) -> Any:
        data.batch["a"] += self.rank
        return data

    @register(Dispatch.DP_COMPUTE_PROTO, materialize_futures=False)
    def unopened(self, data: Any) -> Any:
        return data.get() if type(data).__name__ == "DataProtoFuture" else data


@ray.remote
class ChainedAsync(Chained.__ray_metadata__.modified_class):
    @register(Dispatch.ONE_TO_ALL)
    async def soon(self, y: int) -> int:
        return y


def case_chains() -> dict[str, Any]:
    cluster()
    found: dict[str, Any] = {}
    for cls in (Chained, ChainedAsync):
        name = "async " if cls is ChainedAsync else ""
        group = Group(Pool([2], use_gpu=False), Cls(cls), name_prefix=f"chain{len(name)}")
        found[f"{name}once"] = attempt(lambda group=group: group.rows(group.rows_later(batch(4))), 20)
        if name and isinstance(found["async once"][1], str) and "Error" in found["async once"][1]:
            found["async twice"] = found["async odd"] = found["async unopened"] = found["async once"]
        else:
            more = {
                "twice": lambda group=group: group.rows(group.rows_later(group.rows_later(batch(4)))),
                "odd": lambda group=group: group.rows_later(batch(4)).chunk(3)[1].get().batch["a"],
                "unopened": lambda group=group: group.unopened(group.rows_later(batch(4))),
            }
            found |= {f"{name}{key}": attempt(action, 20) for key, action in more.items()}
        ended(group)
    return found


def _roles() -> dict[str, Any]:
    return {"actor": Cls(Toy, x=1), "critic": Cls(Toy, x=10)}


def case_colocated() -> dict[str, Any]:
    cluster()
    made = ray_base.create_colocated_worker_cls(_roles())
    group = Group(Pool([2], use_gpu=False), made, name_prefix="co")
    roles = group.spawn({"actor", "critic"})
    fused = Group(
        Pool([2], use_gpu=False), ray_base.create_colocated_worker_cls_fused(_roles()), name_prefix="fu"
    )
    parts = fused.spawn({"actor", "critic"})
    raw = ray_base.create_colocated_worker_raw_cls(_roles())
    found = {
        "names": plain([group.worker_names, fused.worker_names]),
        "class names": [made.cls.__class__.__name__, raw.__name__, ray_base.FusedWorkerCLSName],
        "used": [made.fused_worker_used, group.fused_worker_used, fused.fused_worker_used],
        "types": sorted(type(one).__name__ for one in [*roles.values(), *parts.values()]),
        "prefixes": [roles["actor"].name_prefix, parts["actor"].name_prefix, parts["actor"].sub_cls_name],
        "add": attempt(lambda: [roles["actor"].add(1), roles["critic"].add(1)]),
        "fused add": attempt(lambda: [parts["actor"].add(1), parts["critic"].add(1)]),
        "prefixed": attempt(lambda: group.actor_add(1)),
        "role by name": attempt(lambda: roles["actor"].execute_all_sync("add", 1)),
        "fused role by name": attempt(lambda: parts["actor"].execute_all_sync("add", 1)),
        "unregistered of a fused role": attempt(lambda: parts["actor"].execute_all_sync("plain", 1)),
        "rows": attempt(lambda: roles["actor"].rows(batch(4))),
        "fused rows": attempt(lambda: parts["actor"].rows(batch(4))),
        "async": attempt(lambda: roles["actor"].soon(3)),
        "async of a fused role": attempt(lambda: parts["actor"].soon(3)),
        "peers": attempt(lambda: [roles["actor"].peers(), parts["actor"].peers()]),
        "handle": attempt(lambda: ray.get(group.workers[0].critic_add.remote(5))),
        "fused handle": attempt(lambda: ray.get(fused.workers[0]._fuw_execute.remote("critic_fwmn_add", 5))),
        "no role": attempt(lambda: ray.get(fused.workers[0]._fuw_execute.remote("nobody_fwmn_add", 5))),
        "raw": [raw.is_fused_worker, sorted(raw.raw_cls_dict)],
    }
    ended(group)
    ended(fused)
    return found


def case_pools() -> dict[str, Any]:
    cluster()
    whole = Pool([2, 2], use_gpu=False, name_prefix="whole")
    first, second = ray_base.split_resource_pool(whole, [1, 3])
    part = Group(second, Cls(Toy), name_prefix="part")
    merged = ray_base.merge_resource_pool(
        Pool([1], use_gpu=False, name_prefix="a"), Pool([1], use_gpu=False, name_prefix="b")
    )
    tables = [placement_group_table(pg) for pg in whole.get_placement_groups()]
    manager = ray_base.ResourcePoolManager({"g": [2]}, {0: "g"})
    manager.create_resource_pool()

    def uneven() -> Any:
        group = Group(Pool([2, 1], use_gpu=False), Cls(Toy), name_prefix="un")
        return [group.worker_names, group.add(0)]

    def given() -> Any:
        group = Group(Pool([1], use_gpu=False), Cls(Toy), master_addr="127.0.0.1", master_port="33333")
        return [group.master_address == "127.0.0.1", group.master_port == "33333"]

    def typed() -> Any:
        pools = [Pool([1], use_gpu=False, accelerator_type=None) for _ in range(2)]
        for pool in pools:
            pool.get_placement_groups()
            pool.accelerator_type = "T4"
        return ray_base.merge_resource_pool(*pools).accelerator_type

    found = {
        "group names": sorted(table["name"] for table in tables),
        "strategy": [table["strategy"] for table in tables],
        "bundles": plain(whole.get_placement_groups()[0].bundle_specs),
        "parts": [[one.world_size, int(one.start_bundle_index), one.name_prefix] for one in (first, second)],
        "part names": plain(part.worker_names),
        "part ranks": attempt(lambda: part.add(0)),
        "sub local sizes": attempt(lambda: [one["RAY_LOCAL_WORLD_SIZE"] for one in part.environment()]),
        "split again": attempt(
            lambda: [
                [int(x.start_bundle_index), x.world_size]
                for x in ray_base.split_resource_pool(second, [1, 2])
            ]
        ),
        "split badly": attempt(lambda: ray_base.split_resource_pool(whole, 3)),
        "split badly by list": attempt(lambda: ray_base.split_resource_pool(whole, [1, 1])),
        "merged": [merged.store, merged.name_prefix, merged.world_size],
        "merged unlike": attempt(lambda: ray_base.merge_resource_pool(whole, Pool([1], use_gpu=True))),
        "merged unlike shares": attempt(
            lambda: ray_base.merge_resource_pool(whole, Pool([1], use_gpu=False, max_colocate_count=5))
        ),
        "accelerator type": attempt(typed),
        "taken": attempt(
            lambda: len(ray_base.extract_pg_from_exist({"a": whole}, ["a"], Pool([2, 1], use_gpu=False)))
        ),
        "taken too large": attempt(
            lambda: ray_base.extract_pg_from_exist({"a": whole}, ["a"], Pool([3], use_gpu=False))
        ),
        "manager": [manager.get_n_gpus(), sorted(manager.resource_pool_dict), manager.max_colocate_count],
        "manager too large": attempt(
            lambda: ray_base.ResourcePoolManager({"g": [99]}, {0: "g"}).create_resource_pool()
        ),
        "uneven": attempt(uneven),
        "meeting point given": attempt(given),
        "port range": attempt(lambda: ray.get(ray_base.get_master_addr_port.remote([42000, 42100]))[1]),
    }
    ended(part)
    return found


def case_devices() -> dict[str, Any]:
    cluster()
    group = Group(Pool([2], max_colocate_count=2), Cls(Toy), name_prefix="gpu")
    found = {
        "devices": sorted(group.execute_all_sync("get_cuda_visible_devices")),
        "local": attempt(lambda: [one["LOCAL_RANK"] for one in group.environment()]),
    }
    ended(group)
    return found


def case_words() -> dict[str, str]:
    """Of sentences that need a cluster: whether they are said."""
    cluster()
    manager = ray_base.ResourcePoolManager({"g": [99]}, {0: "g"})
    listed = [
        Sentence(
            "worker_env",
            lambda: Group(Pool([1], use_gpu=False), Cls(Toy), worker_env={"RANK": "1", "MINE": "2"}),
            ValueError,
            "Cannot override protected system env: {'RANK'}",
        ),
        Sentence(
            "use_gpu",
            lambda: Group(Pool([1], use_gpu=False), Cls(Toy), use_gpu=True),
            ValueError,
            "use_gpu is True but resource_pool.use_gpu is False",
        ),
        Sentence(
            "too large",
            manager.create_resource_pool,
            ValueError,
            "is less than total desired GPUs 99",
        ),
    ]
    return {one.where: one.said() == one.text or one.said() for one in listed}
