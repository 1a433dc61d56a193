"""Groups and pools of the drop-in after the process has left their cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import run

SCRIPT = """
import pickle
import ray
from phalanx.compat.verl.single_controller.base import Worker
from phalanx.compat.verl.single_controller.base.decorator import Dispatch, register
from phalanx.compat.verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from phalanx.compat.verl.single_controller.ray.base import merge_resource_pool, split_resource_pool

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
assert pickle.loads(pickle.dumps(pool))._connection is None
for act in (
    lambda: group.add(1),
    lambda: group.execute_rank_zero_sync("add", 1),
    lambda: RayWorkerGroup(pool, RayClassWithInitArgs(cls=ray.remote(Adder))),
    lambda: split_resource_pool(pool, 1),
    lambda: merge_resource_pool(pool, kept[0]),
):
    try:
        act()
    except Exception as error:
        print(type(error).__name__, "make a new pool" in str(error))
del group, pool
print("the others:", kept[1].add(1))
"""


@pytest.mark.slow
def test_a_driver_can_leave_its_cluster_and_create_groups_on_another(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(SCRIPT)

    assert run(tmp_path / "driver.py", backend="ray", folder=tmp_path).splitlines()[-6:] == [
        *["GroupClosed False"] * 2,
        *["PlacementError True"] * 3,
        "the others: [1, 2]",
    ]
