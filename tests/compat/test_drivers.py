"""Drivers of drop-in groups that end: only detached workers stay, for another driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import placement_group_table

from tests.support.fault_workers import is_there, within

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

WORKERS = """
import sys, ray
from phalanx.compat.verl.single_controller.base import Worker
from phalanx.compat.verl.single_controller.base.decorator import Dispatch, register

@ray.remote
class Trainer(Worker):
    def __init__(self):
        super().__init__()
        self.steps = 0

    @register(Dispatch.DP_COMPUTE)
    def train(self, x):
        self.steps += 1
        return x + self.rank + self.steps
"""
SERVER = """
from workers import *
from phalanx.compat.verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
ray.init(address=sys.argv[1], namespace="verl")
pool = RayResourcePool([2], use_gpu=False, detached=True, name_prefix="left")
group = RayWorkerGroup(pool, RayClassWithInitArgs(Trainer), name_prefix="trainer", detached=True)
group.train([0, 0])
print(group.worker_names)
"""
CLIENT = """
from workers import *
from phalanx.compat.verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
ray.init(address=sys.argv[1], namespace="verl")
group = RayWorkerGroup.from_detached(
    worker_names=["trainerTrainer_0:0", "trainerTrainer_0:1"], ray_cls_with_init=RayClassWithInitArgs(Trainer)
)
print(group.train([10, 20]))
for worker in group.workers:
    ray.kill(worker)
ray.util.remove_placement_group(ray.util.get_placement_group("leftverl_group_2:0"))
"""


def test_a_second_driver_can_use_the_detached_workers_of_the_first(tmp_path: Path) -> None:
    address, printed = ray.get_runtime_context().gcs_address, []
    for name, text in (("workers", WORKERS), ("server", SERVER), ("client", CLIENT)):
        (tmp_path / f"{name}.py").write_text(text)
    for script in ("server.py", "client.py"):
        done = subprocess.run(
            [sys.executable, script, address], cwd=tmp_path, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr[-3000:]
        printed.append(done.stdout)

    assert "['trainerTrainer_0:0', 'trainerTrainer_0:1']" in printed[0]
    assert "[12, 23]" in printed[1]


DRIVER = '''
import json, os, signal, subprocess, sys, time
import ray
from phalanx.compat.verl.single_controller.base import Worker
from phalanx.compat.verl.single_controller.base.decorator import Dispatch, register
from phalanx.compat.verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

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
        [sys.executable, "-c", DRIVER, ray.get_runtime_context().gcs_address],
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

    def left() -> list[object]:
        groups = [
            group["name"]
            for group in placement_group_table().values()
            if group["name"].startswith(f"killed-{driver.pid}") and group["state"] != "REMOVED"
        ]
        return [*filter(is_there, pids), *groups]

    assert within(5.0, lambda: not left()), left()
