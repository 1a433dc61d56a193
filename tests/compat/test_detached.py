"""Workers that outlive their driver, found again by name from another one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

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
pool = RayResourcePool([2], use_gpu=False, detached=True)
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
"""
CLUSTER = """
import os, subprocess, sys, ray
cluster = ray.init(num_cpus=4, include_dashboard=False)
for script in ("server.py", "client.py"):
    command = [sys.executable, script, cluster.address_info["gcs_address"]]  # there may be other clusters
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout, done.stderr[-3000:] if done.returncode else "")
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_second_driver_goes_on_with_the_workers_of_the_first(tmp_path: Path) -> None:
    for name, text in (("workers", WORKERS), ("server", SERVER), ("client", CLIENT), ("cluster", CLUSTER)):
        (tmp_path / f"{name}.py").write_text(text)
    with tempfile.TemporaryDirectory(prefix="px") as folder:
        environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": folder}
        environment.pop("RAY_ADDRESS", None)
        done = subprocess.run(
            [sys.executable, "cluster.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )

    assert "['trainerTrainer_0:0', 'trainerTrainer_0:1']" in done.stdout, done.stdout + done.stderr[-2000:]
    assert "[12, 23]" in done.stdout, done.stdout
