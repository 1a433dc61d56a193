"""Groups and pools of the drop-in after the process has left their cluster."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.compat.verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from phalanx.compat.verl.single_controller.ray.base import merge_resource_pool, split_resource_pool
from phalanx.errors import GroupClosed, PlacementError
from tests.support.scripts import run

SCRIPT = """
import ray
from phalanx.compat.verl.single_controller.base import Worker
from phalanx.compat.verl.single_controller.base.decorator import Dispatch, register
from phalanx.compat.verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

class Adder(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def add(self, x):
        return x + self.rank

def made():
    ray.init(address="local", num_cpus=4, include_dashboard=False)
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=2)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(cls=ray.remote(Adder)))
    assert group.add(1) == [1, 2]
    return pool, group

pool, group = made()
ray.shutdown()
kept = made()
for act in (lambda: group.add(1), lambda: RayWorkerGroup(pool, RayClassWithInitArgs(cls=ray.remote(Adder)))):
    try:
        act()
    except Exception as error:
        print(type(error).__name__)
del group, pool
print("the others:", kept[1].add(1))
"""


def gone() -> Any:
    def check() -> None:
        raise GroupClosed("left")

    return SimpleNamespace(open=False, check=check)


def left_pool() -> RayResourcePool:
    pool = RayResourcePool([2])
    pool.pgs, pool._connection = [SimpleNamespace(bundle_count=2)], gone()
    return pool


@pytest.mark.parametrize("name", ["execute_all_async", "execute_rank_zero_sync", "execute_all_sync"])
def test_a_group_refuses_calls_after_its_cluster_was_left(name: str) -> None:
    group = RayWorkerGroup(worker_handles=[object(), object()])
    group._connection = gone()

    with pytest.raises(GroupClosed):
        getattr(group, name)("method", [1, 2])


def test_a_pool_of_a_left_cluster_is_refused_and_pickles_without_its_connection() -> None:
    for act in (
        RayResourcePool.get_placement_groups,
        lambda pool: split_resource_pool(pool, 1),
        lambda pool: merge_resource_pool(pool, RayResourcePool([1])),
    ):
        with pytest.raises(PlacementError, match="make a new pool"):
            act(left_pool())
    assert pickle.loads(pickle.dumps(left_pool()))._connection is None


@pytest.mark.slow
def test_a_driver_can_leave_its_cluster_and_create_groups_on_another(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(SCRIPT)

    assert run(tmp_path / "driver.py", backend="ray", folder=tmp_path).splitlines()[-3:] == [
        "GroupClosed",
        "PlacementError",
        "the others: [1, 2]",
    ]
