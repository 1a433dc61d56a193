"""Pools: placement groups, splitting, merging, managers, and the ranks of groups on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group_table, remove_placement_group

from phalanx.backends.backend_types import ReserveRequest
from phalanx.compat.verl import overlay
from phalanx.compat.verl.single_controller.base import Worker
from phalanx.compat.verl.single_controller.base.decorator import Dispatch, register
from phalanx.compat.verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    SubRayResourcePool,
    native,
)
from phalanx.compat.verl.single_controller.ray import pools as pools_module
from phalanx.compat.verl.single_controller.ray.base import merge_resource_pool, split_resource_pool
from phalanx.compat.verl.single_controller.ray.start import _options
from phalanx.errors import DeclarationError, PlacementError
from phalanx.topology.placement import NodeCapacity

Make = Callable[..., RayResourcePool]


@ray.remote
class Where(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @register(Dispatch.ONE_TO_ALL)
    def accelerators(self) -> list[Any]:
        return ray.get_runtime_context().get_accelerator_ids().get("GPU", [])


@pytest.fixture
def make(ray_cluster: None) -> Iterator[Make]:
    """Function that makes pools, whose placement groups are removed after the test."""
    made: list[RayResourcePool] = []

    def new(*args: Any, **options: Any) -> RayResourcePool:
        made.append(RayResourcePool(*args, **{"use_gpu": False, **options}))
        return made[-1]

    yield new
    for pool in made:
        for pg in pool.pgs or []:
            remove_placement_group(pg)


def group_on(pool: RayResourcePool, **options: Any) -> RayWorkerGroup:
    return RayWorkerGroup(pool, RayClassWithInitArgs(Where), **options)


def test_placement_groups_are_named_after_prefix_and_shape(make: Make) -> None:
    pool = make([2, 1], name_prefix="named")
    assert pool.pgs is None  # nothing is reserved before

    groups = pool.get_placement_groups()

    assert pool.get_placement_groups() is groups
    assert [placement_group_table(pg)["name"] for pg in groups] == [
        "namedverl_group_2_1:0",
        "namedverl_group_2_1:1",
    ]
    with pytest.raises(PlacementError, match="can never be placed"):
        RayResourcePool([99]).get_placement_groups()


def test_each_rank_has_its_own_device_and_groups_on_one_pool_share_devices(make: Make) -> None:
    pool = make([2], use_gpu=True, max_colocate_count=2)
    group = group_on(pool)

    devices = group.accelerators()
    assert sorted(map(len, devices)) == [1, 1]
    assert devices[0] != devices[1]
    assert group.variable("LOCAL_RANK") == ["0", "0"]
    assert group_on(pool).accelerators() == devices


def test_a_split_pool_has_named_parts_that_cannot_be_merged(make: Make) -> None:
    first, second = split_resource_pool(make([2, 2], name_prefix="whole"), split_size=2)

    assert [part.world_size for part in (first, second)] == [2, 2]
    assert [part.name_prefix for part in (first, second)] == ["whole_split_0", "whole_split_1"]
    assert isinstance(first, SubRayResourcePool)
    # It would have all four slots.
    with pytest.raises(AssertionError, match="a part of a pool cannot be merged"):
        merge_resource_pool(first, second)


@pytest.mark.slow
def test_groups_on_parts_of_a_pool_have_their_own_ranks_and_names(make: Make) -> None:
    first, second = split_resource_pool(make([2, 2]), split_size=[1, 3])
    group = group_on(second, name_prefix="part")

    assert group_on(first).variable("WORLD_SIZE") == ["1"]
    assert group.worker_names == ["partWhere_0:1", "partWhere_1:0", "partWhere_1:1"]
    assert group.variable("RANK") == ["0", "1", "2"]


@pytest.mark.parametrize("split_size", [3, 0, [1, 1], [2, 3], [4, 0]])
def test_split_sizes_that_do_not_add_up_are_refused(make: Make, split_size: Any) -> None:
    with pytest.raises(AssertionError):
        split_resource_pool(make([4]), split_size=split_size)


@pytest.mark.soak
def test_ranks_on_uneven_and_merged_pools_know_their_node_local_ranks(make: Make) -> None:
    group = group_on(make([2, 1]), name_prefix="uneven")
    merged = merge_resource_pool(make([2], name_prefix="a"), make([1], name_prefix="b"))

    assert group.worker_names == ["unevenWhere_0:0", "unevenWhere_0:1", "unevenWhere_1:0"]
    assert (merged.store, merged.name_prefix, merged.world_size) == ([2, 1], "a_b", 3)
    for one in (group, group_on(merged)):
        assert one.variable("RANK") == ["0", "1", "2"]
        assert one.variable("RAY_LOCAL_WORLD_SIZE") == ["2", "2", "1"]


@pytest.mark.parametrize("count", [0, 2.5, True, "3"])
def test_a_pool_for_no_whole_number_of_groups_is_refused(count: Any) -> None:
    with pytest.raises(DeclarationError, match="max_colocate_count"):
        RayResourcePool([1], max_colocate_count=count)


@pytest.mark.parametrize("option", [{"use_gpu": True}, {"max_colocate_count": 3}])
def test_only_pools_with_equal_options_merge_and_keep_their_accelerator_type(
    make: Make, option: dict[str, Any]
) -> None:
    with pytest.raises(AssertionError, match=next(iter(option))):
        merge_resource_pool(make([1]), make([1], **option))

    pools = [RayResourcePool([1], accelerator_type="A100") for _ in range(2)]
    for pool in pools:
        pool.pgs = []
    assert merge_resource_pool(*pools).accelerator_type == "A100"


def test_placement_groups_are_sorted_by_node_address_in_merged_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"x": "10.0.0.10", "y": "10.0.0.9", "z": "9.255.0.1"}
    nodes = [{"NodeID": node, "NodeManagerAddress": address} for node, address in addresses.items()]
    monkeypatch.setattr(pools_module.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(
        pools_module, "placement_group_table", lambda pg: {"bundles_to_node_id": {0: pg.node}}
    )

    pools: Any = [RayResourcePool([1]) for _ in "zyx"]
    for pool, node in zip(pools, "zyx", strict=True):
        pool.pgs = [SimpleNamespace(node=node)]

    merged: Any = merge_resource_pool(merge_resource_pool(*pools[:2]), pools[2])

    assert [pg.node for pg in merged.pgs] == ["x", "y", "z"]  # as text, like verl


def test_a_manager_creates_pools_by_name_and_refuses_more_gpus_than_available(ray_cluster: None) -> None:
    manager = ResourcePoolManager({"global": [2], "reward": [1]}, {0: "global", "rm": "reward"})

    manager.create_resource_pool()

    assert manager.get_n_gpus() == 3
    assert manager.get_resource_pool(0) is manager.resource_pool_dict["global"]
    assert manager.get_resource_pool("rm").max_colocate_count == 3
    with pytest.raises(ValueError, match="Total available GPUs 8"):
        ResourcePoolManager({"global": [99]}, {0: "global"}).create_resource_pool()


def test_a_group_with_an_unavailable_additional_resource_is_refused(make: Make) -> None:
    cls = RayClassWithInitArgs(Where)
    cls.set_additional_resource({"unobtainable": 1})

    with pytest.raises(PlacementError, match="unobtainable"):
        RayWorkerGroup(make([1]), cls)


@pytest.mark.slow
def test_the_users_runtime_env_and_worker_env_reach_the_ranks(make: Make) -> None:
    cls = RayClassWithInitArgs(Where)
    cls.update_options({"runtime_env": {"env_vars": {"FROM_RUNTIME_ENV": "kept"}}})
    group = RayWorkerGroup(make([1]), cls, worker_env={"FROM_WORKER_ENV": "given", "LOCAL_RANK": "3"})

    assert group.variable("FROM_RUNTIME_ENV") == ["kept"]
    assert group.variable("FROM_WORKER_ENV") == ["given"]
    assert group.variable("LOCAL_RANK") == ["3"]


def test_a_group_refuses_protected_variables_and_gpus_on_a_pool_without_gpus() -> None:
    cls, variables = RayClassWithInitArgs(Where), ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in (*variables, "WG_PREFIX", "WG_BACKEND"):
        with pytest.raises(ValueError, match=rf"Cannot override protected system env: \{{'{name}'\}}"):
            RayWorkerGroup(RayResourcePool([1]), cls, worker_env={name: "1", "MINE": "2"})
    with pytest.raises(ValueError, match=r"use_gpu is True but resource_pool\.use_gpu is False"):
        RayWorkerGroup(RayResourcePool([1], use_gpu=False), cls, use_gpu=True)


def test_runtime_envs_are_merged_variable_by_variable() -> None:
    cls = RayClassWithInitArgs(Where)
    cls.update_options({"runtime_env": {"env_vars": {"A": "1", "B": "1"}}, "num_cpus": 2})
    cls.update_options({"runtime_env": {"env_vars": {"B": "2"}}})

    options = cls.ray_options()
    assert options["runtime_env"]["env_vars"] == {"A": "1", "B": "2"}
    assert options["num_cpus"] == 2


def options(cls: Any, device: str = "cpu", **ray_options: Any) -> Any:
    given = RayClassWithInitArgs(ray.remote(cls))
    given.update_options(ray_options)
    group = SimpleNamespace(
        ray_cls_with_init=given,
        customized_worker_env={},
        device_name=device,
        profile_steps=[1, 5],
        worker_nsight_options={"o": "x", "capture-range-end": None},  # verl's default
        _ray_wait_register_center_timeout=300,
    )
    return _options(group, cls)


@pytest.mark.parametrize(
    ("device", "nsight"), [("cuda", {"o": "x", "capture-range-end": "repeat-shutdown:12"}), ("cpu", None)]
)
def test_the_profile_of_a_cuda_group_ends_after_its_steps(device: str, nsight: dict[str, str] | None) -> None:
    assert (options(Worker, device).runtime_env or {}).get("nsight") == nsight


class Soon(Worker):
    async def soon(self) -> None: ...


def test_max_concurrency_needs_async_methods(caplog: pytest.LogCaptureFixture) -> None:
    given = [options(Soon), options(Soon, max_concurrency=1), options(Worker, max_concurrency=4)]

    assert [one.max_concurrency for one in given] == [1000, 1, None]
    assert "max_concurrency=4 of Worker has no effect" in caplog.text


@pytest.mark.soak
def test_the_master_address_and_port_can_be_given(make: Make) -> None:
    group = group_on(make([1]), master_addr="127.0.0.1", master_port="33333")

    assert (group.master_address, group.master_port) == ("127.0.0.1", "33333")
    assert group.variable("MASTER_PORT") == ["33333"]


@pytest.mark.slow
def test_a_group_takes_its_port_from_a_range_and_can_run_without_accelerators(make: Make) -> None:
    group = group_on(make([1], use_gpu=True), use_gpu=False, master_port_range=[41000, 41100])

    assert 41000 <= int(group.master_port or 0) < 41100
    assert group.accelerators() == [[]]


def bundle(pool: RayResourcePool, *cpus: float, active: bool = True) -> dict[str, float]:
    """Return the resources that a slot of the pool requests on nodes with ``cpus`` CPUs."""
    asked: list[ReserveRequest] = []

    def reserve(request: ReserveRequest) -> SimpleNamespace:
        asked.append(request)
        return SimpleNamespace(ids=())

    nodes = [NodeCapacity(str(index), "host", {"CPU": cpu}, {}) for index, cpu in enumerate(cpus)]
    transport = SimpleNamespace(reserve=reserve, nodes=lambda: nodes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlay, "active", lambda: active)
        patch.setattr(native, "backend", lambda: transport)
        patch.setattr(pools_module, "Connection", lambda: None)
        patch.setattr(pools_module, "resource_name", lambda device_name: "GPU")
        patch.setattr(pools_module, "sort_placement_group_by_node_ip", list)
        pool.get_placement_groups()
    return dict(asked[0].bundle)


@pytest.mark.parametrize(
    ("cpus", "active", "asked"),
    [
        ((8, 8), True, {"GPU": 1.0, "CPU": 3.0}),
        ((8,), True, {"GPU": 1.0}),  # too few CPUs, of which none are reserved
        ((5, 5, 5), True, {"GPU": 1.0}),
        ((64,), False, {"GPU": 1.0}),
    ],
)
def test_a_slot_reserves_cpus_for_servers_as_verl_does_if_the_cluster_has_enough(
    cpus: tuple[float, ...], active: bool, asked: dict[str, float]
) -> None:
    assert bundle(RayResourcePool([2, 2], max_colocate_count=3), *cpus, active=active) == asked
    assert bundle(RayResourcePool([2], use_gpu=False), 64)["CPU"] < 0.1
