"""Drivers of drop-in groups that end, or leave their cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from tests.support.fault_workers import is_there, left_of_driver, within
from tests.support.scripts import run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

IMPORTS = """
import ray
from phalanx.compat.verl.single_controller.base import Worker
from phalanx.compat.verl.single_controller.base.decorator import Dispatch, register
from phalanx.compat.verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
"""
DRIVER = '''
import json, os, signal, subprocess, sys, time

@ray.remote
class Loader(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def start_child(self):
        sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
        start = f"""import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {sleep!r}], stdout=subprocess.DEVNULL, start_new_session=True)
print(child.pid)"""
        # its parent ends at once, so that the child is nobody's: only who has seen it, or its mark, finds it
        done = subprocess.run([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True, check=True)
        return [os.getpid(), int(done.stdout)]

    @register(Dispatch.ONE_TO_ALL)
    def nap(self):
        time.sleep(1000)

ray.init(address=sys.argv[1], log_to_driver=False)
pool = RayResourcePool([2], use_gpu=False, name_prefix=f"killed-{os.getpid()}")
group = RayWorkerGroup(pool, RayClassWithInitArgs(Loader))
print(json.dumps([pid for pids in group.start_child() for pid in pids]), flush=True)
group.nap()
'''


def test_a_killed_driver_leaves_no_processes_or_placement_groups() -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", IMPORTS + DRIVER, ray.get_runtime_context().gcs_address],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert driver.stdout is not None
    pids = json.loads(driver.stdout.readline())
    assert len(pids) == 4
    assert all(map(is_there, pids))

    driver.send_signal(signal.SIGKILL)
    driver.wait()
    driver.stdout.close()

    name = f"killed-{driver.pid}"
    assert within(5.0, lambda: not left_of_driver(pids, name)), left_of_driver(pids, name)


LEAVING = """
import pickle
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


def test_a_driver_can_leave_its_cluster_and_create_groups_on_another(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(IMPORTS + LEAVING)

    assert run(tmp_path / "driver.py", backend="ray", folder=tmp_path).splitlines()[-6:] == [
        *["GroupClosed False"] * 2,
        *["PlacementError True"] * 3,
        "the others: [1, 2]",
    ]
