"""Engines leave nothing behind, and several of them live on one machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

import phalanx as px
from phalanx.engines import SamplingParams
from phalanx.engines.vllm import VllmRollout
from tests.engines.vllm.conftest import (
    engine_processes,
    file_of_output,
    folders_of_sockets,
    refuses,
    shared_memory,
)
from tests.engines.vllm.kinds import KINDS, ONE_THREAD, SMALL, made
from tests.engines.vllm.models import Source

ROOT = Path(__file__).resolve().parents[3]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPTS = [[5, 6], [7, 8, 9], [10]]

DRIVER = """
import json, os, sys, time
import psutil
import phalanx as px
from tests.engines.vllm.kinds import KINDS, ONE_THREAD, SMALL, made
px.init(num_cpus=4, num_gpus=2)
pool, group = made(sys.argv[1], sys.argv[3])
told = {"pids": [], "urls": []}
if "beside" in sys.argv[3]:
    told["urls"] = [endpoint.url for endpoint in px.engines.endpoints(group)]
for number in range(600):
    group.generate([[5], [6, 7]])
    for pid in group.run(lambda worker: os.getpid()):
        told["pids"] += [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    with open(sys.argv[2] + ".new", "w") as file:
        json.dump(told | {"number": number}, file)
    os.rename(sys.argv[2] + ".new", sys.argv[2])
    time.sleep(1)
"""


def lives(pid: int) -> bool:
    """Whether there is such a process, and it is more than the memory of one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def cycle(folder: str, kind: str) -> None:
    pool, group = made(folder, kind)
    with pool:
        assert len(group.generate(PROMPTS, GREEDY)) == len(PROMPTS)


SOAKED = [pytest.param(kind, 10, marks=(pytest.mark.soak, pytest.mark.timeout(1800))) for kind in KINDS]


@pytest.mark.parametrize(("kind", "cycles"), [("own", 3), *SOAKED])
def test_engines_that_were_closed_leave_nothing(
    cluster: None, models: dict[str, str], kind: str, cycles: int
) -> None:
    before = engine_processes(), shared_memory(), folders_of_sockets()
    for _ in range(cycles):
        cycle(models["untied"], kind)
        assert engine_processes() <= before[0]
        assert shared_memory() <= before[1]
        assert folders_of_sockets() <= before[2]


class Driver:
    """A script with an engine, which generates every second, and tells what it has."""

    def __init__(self, folder: Path, model: str, kind: str) -> None:
        script, self._file = folder / "driver.py", folder / "told"
        script.write_text(DRIVER)
        quiet = subprocess.DEVNULL
        command = [sys.executable, str(script), model, str(self._file), kind]
        self._process = subprocess.Popen(command, stdout=quiet, stderr=quiet, cwd=ROOT, env=env_of_script())

    def told(self, after: int = -1) -> dict[str, Any]:
        """What it told last, once it has generated more often than ``after`` says."""
        while True:
            assert self._process.poll() is None
            if self._file.exists() and (told := json.loads(self._file.read_text()))["number"] > after:
                return told
            time.sleep(0.05)

    def kill(self) -> None:
        """As the system does it where memory is short."""
        self._process.kill()
        self._process.wait()


def env_of_script() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def check_that_nothing_is_left_of_one_that_is_killed(
    folder: Path, model: str, kind: str, before: tuple[set[str], set[str]]
) -> None:
    one = Driver(folder, model, kind)
    told = one.told()
    one.kill()

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (shared_memory() - before[0] or any(map(lives, told["pids"]))):
        time.sleep(0.05)
    assert told["pids"] and not [pid for pid in told["pids"] if lives(pid)]
    assert shared_memory() <= before[0]
    assert folders_of_sockets() <= before[1]
    for place in map(urlparse, told["urls"]):
        assert refuses(place.hostname or "", place.port or 0)


def test_a_driver_that_is_killed_leaves_nothing(models: dict[str, str], tmp_path: Path) -> None:
    before = shared_memory(), folders_of_sockets()

    check_that_nothing_is_left_of_one_that_is_killed(tmp_path, models["untied"], "own", before)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_a_driver_that_is_killed_leaves_nothing_and_another_goes_on(
    models: dict[str, str], tmp_path: Path, kind: str
) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    other = Driver(folders[1], models["untied"], kind)
    try:
        other.told()
        before = shared_memory(), folders_of_sockets()
        check_that_nothing_is_left_of_one_that_is_killed(folders[0], models["untied"], kind, before)
        assert other.told(after=other.told()["number"])["pids"]
    finally:
        other.kill()


@pytest.mark.soak
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("beside")])
def test_a_driver_that_is_killed_while_its_engine_starts_leaves_nothing(
    models: dict[str, str], tmp_path: Path, kind: str
) -> None:
    """What has a name until all have it open is there then."""
    before = engine_processes(), shared_memory(), folders_of_sockets()

    def left() -> list[Any]:
        return [engine_processes() - before[0], shared_memory() - before[1], folders_of_sockets() - before[2]]

    driver = Driver(tmp_path, models["untied"], kind)
    try:
        until(lambda: all(left()), 120)
    finally:
        driver.kill()

    until(lambda: not any(left()), 30)


def until(condition: Callable[[], object], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


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
        outputs = [Path(name) for name in rollout.run(file_of_output)]

    assert shared_memory() <= before
    assert not [name for name in outputs if "Exception ignored" in name.read_text()]


@pytest.mark.soak
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
        with pytest.raises(px.weights.WeightsError, match=r"tp rank 1: .*this rank is broken"):
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
        from phalanx.engines.vllm import tp_group as team

        def broken(*_: object) -> None:
            raise MemoryError("this rank is broken")

        team.reload = broken  # type: ignore[assignment]
