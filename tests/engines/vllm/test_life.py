"""Engines leave nothing behind, and several of them live on one machine."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import phalanx as px
from phalanx.engines import Sampling
from phalanx.engines.vllm import VllmRollout
from tests.engines.vllm.conftest import ONE_THREAD, SMALL, folders_of_sockets, shared_memory
from tests.engines.vllm.models import Source

GREEDY = Sampling(max_tokens=8, temperature=0, ignore_eos=True)
PROMPTS = [[5, 6], [7, 8, 9], [10]]

DRIVER = """
import os, sys, time
import psutil
import phalanx as px
from phalanx.engines.vllm import AsyncVllmRollout, VllmRollout
px.init(num_cpus=4)
pool = px.ResourcePool([1], use_gpu=False)
kind = {"own": VllmRollout, "beside": AsyncVllmRollout}[sys.argv[3]]
bound = kind.bind(sys.argv[1], dtype="float32", kv_cache_memory_bytes=1 << 24)
group = px.WorkerGroup(pool, bound, env={"OMP_NUM_THREADS": "1"})
group.generate([[5]])
with open(sys.argv[2] + ".new", "w") as file:
    (pid,) = group.run(lambda worker: os.getpid())
    print(pid, *(child.pid for child in psutil.Process(pid).children(recursive=True)), file=file)
os.rename(sys.argv[2] + ".new", sys.argv[2])
time.sleep(600)
"""


def lives(pid: int) -> bool:
    """Whether there is such a process, and it is more than the memory of one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def cycle(folder: str) -> None:
    with px.ResourcePool([1], use_gpu=False) as pool:
        group = px.WorkerGroup(pool, VllmRollout.bind(folder, **SMALL), name="rollout", env=ONE_THREAD)
        assert len(group.generate(PROMPTS, GREEDY)) == len(PROMPTS)


@pytest.mark.parametrize("cycles", [3, pytest.param(10, marks=pytest.mark.soak)])
def test_engines_that_were_closed_leave_nothing(cluster: None, models: dict[str, str], cycles: int) -> None:
    before = shared_memory()
    for _ in range(cycles):
        cycle(models["untied"])

    assert shared_memory() <= before


@pytest.mark.soak
@pytest.mark.parametrize("where", ["own", "beside"])
def test_a_driver_that_is_killed_leaves_nothing(models: dict[str, str], tmp_path: Path, where: str) -> None:
    before, folders = shared_memory(), folders_of_sockets()
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    told = tmp_path / "pids"
    quiet = subprocess.DEVNULL
    command = [sys.executable, str(script), models["untied"], str(told), where]
    driver = subprocess.Popen(command, stdout=quiet, stderr=quiet)
    while not told.exists():
        assert driver.poll() is None
        time.sleep(0.05)
    pids = [int(pid) for pid in told.read_text().split()]
    assert pids
    driver.send_signal(signal.SIGKILL)
    driver.wait()

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (shared_memory() - before or any(map(lives, pids))):
        time.sleep(0.05)
    assert not [pid for pid in pids if lives(pid)]
    assert shared_memory() <= before
    assert folders_of_sockets() <= folders


def test_tensor_parallel_ranks_are_one_engine(cluster: None, models: dict[str, str]) -> None:
    before = shared_memory()
    folder = models["tied"]
    with px.ResourcePool([3], use_gpu=False) as pool:
        source = px.WorkerGroup(pool[0:1], Source.bind(folder), name="source", env=ONE_THREAD)
        bound = VllmRollout.bind(folder, tensor_parallel_size=2, **SMALL)
        rollout = px.WorkerGroup(pool[1:3], bound, name="rollout", env=ONE_THREAD)
        sync = px.WeightSync(source, rollout, "policy")
        for seed in range(3):
            made = [one.tokens for one in rollout.generate(PROMPTS, GREEDY)]
            assert made == source.greedy(PROMPTS, GREEDY.max_tokens)
            source.change(seed)
            sync()
        assert [one.tokens for one in rollout.generate(PROMPTS, GREEDY)] == source.greedy(PROMPTS, 8)

    assert shared_memory() <= before


def test_two_tensor_parallel_engines_of_a_group(cluster: None, models: dict[str, str]) -> None:
    """They split prompts, say which of them cannot load, and come back by a restart."""
    before = shared_memory()
    folder = models["untied"]
    with px.ResourcePool([5], use_gpu=False) as pool:
        source = px.WorkerGroup(pool[0:1], Source.bind(folder), name="source", env=ONE_THREAD)
        bound = VllmRollout.bind(folder, tensor_parallel_size=2, **SMALL)
        rollout = px.WorkerGroup(pool[1:5], bound, name="rollout", env=ONE_THREAD)
        sync = px.WeightSync(source, rollout, "policy")
        source.change(1)
        sync()
        check(rollout, source)
        assert [one.requests > 0 for one in rollout.engine_statistics()] == [True, False, True, False]

        rollout.run(break_loading)
        with pytest.raises(px.WeightsError, match=r"tp rank 1: .*this rank is broken"):
            sync()
        rollout.restart()
        source.change(2)
        sync()
        check(rollout, source)

    assert shared_memory() <= before


def check(rollout: px.WorkerGroup, source: px.WorkerGroup) -> None:
    """Answers are those of the source's model."""
    made = [one.tokens for one in rollout.generate(PROMPTS, GREEDY)]
    assert made == source.greedy(PROMPTS, GREEDY.max_tokens)


def break_loading(worker: VllmRollout) -> None:
    """On a rank that follows another, no weights can be loaded any more."""
    if worker.rank == 1:
        from phalanx.engines.vllm import team

        def broken(*_: object) -> None:
            raise MemoryError("this rank is broken")

        team.reload = broken  # type: ignore[assignment]
