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

import psutil
import pytest

import phalanx as px
from phalanx.engines import SamplingParams
from phalanx.engines.vllm import VllmRollout
from tests.conformance.engines import Source
from tests.engines.vllm.conftest import KINDS, ONE_THREAD, SMALL, left_since, refuses, things_of_engines
from tests.engines.vllm.models import load_model
from tests.support.fault_workers import is_there

ROOT = Path(__file__).resolve().parents[3]


DRIVER = """
import json, os, sys, time
import psutil
import phalanx as px
from tests.engines.vllm.conftest import made
px.init(num_cpus=4, num_gpus=2)
pool, group = made(sys.argv[1], sys.argv[3], serve=True)
told = {"pids": [], "urls": [endpoint.url for endpoint in px.engines.endpoints(group)]}
for number in range(600):
    group.generate([[5], [6, 7]])
    for pid in group.run(lambda worker: os.getpid()):
        told["pids"] += [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    with open(sys.argv[2] + ".new", "w") as file:
        json.dump(told | {"number": number}, file)
    os.rename(sys.argv[2] + ".new", sys.argv[2])
    time.sleep(1)
"""


class Driver:
    """A script with an engine that generates every second and reports its processes and URLs."""

    def __init__(self, folder: Path, model: str, kind: str) -> None:
        script, self._file = folder / "driver.py", folder / "told"
        script.write_text(DRIVER)
        quiet = subprocess.DEVNULL
        command = [sys.executable, str(script), model, str(self._file), kind]
        self._process = subprocess.Popen(command, stdout=quiet, stderr=quiet, cwd=ROOT, env=env_of_script())

    def told(self, after: int = -1) -> dict[str, Any]:
        """Return the last report, once its number is above ``after``."""
        while True:
            assert self._process.poll() is None
            if self._file.exists() and (told := json.loads(self._file.read_text()))["number"] > after:
                return told
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill processes as the system does if memory is short."""
        self._process.kill()
        self._process.wait()


def env_of_script() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def check_that_nothing_is_left_of_one_that_is_killed(
    folder: Path, model: str, kind: str, before: list[set[Any]]
) -> None:
    one = Driver(folder, model, kind)
    told = one.told()
    one.kill()

    until_nothing(lambda: [*left_since(before), set(filter(is_there, told["pids"]))], 5)
    assert told["pids"]
    for place in map(urlparse, told["urls"]):
        assert refuses(place.hostname or "", place.port or 0)


def test_a_killed_driver_leaves_nothing_of_its_engine(models: dict[str, str], tmp_path: Path) -> None:
    before = things_of_engines()

    check_that_nothing_is_left_of_one_that_is_killed(tmp_path, models["untied"], KINDS[1], before)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_driver_leaves_nothing_and_another_driver_continues(
    models: dict[str, str], tmp_path: Path, kind: str
) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    other = Driver(folders[1], models["untied"], kind)
    try:
        other.told()
        before = things_of_engines()
        check_that_nothing_is_left_of_one_that_is_killed(folders[0], models["untied"], kind, before)
        assert other.told(after=other.told()["number"])["pids"]
    finally:
        other.kill()


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_a_driver_killed_during_the_start_of_its_engine_leaves_nothing(
    models: dict[str, str], tmp_path: Path, kind: str
) -> None:
    """At that time, files exist that are unlinked once all processes have opened them."""
    before = things_of_engines()
    driver = Driver(tmp_path, models["untied"], kind)
    try:
        while not all(left_since(before)):
            time.sleep(0.02)
    finally:
        driver.kill()

    until_nothing(lambda: left_since(before), 30)


def until_nothing(left: Callable[[], list[set[Any]]], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while any(found := left()):
        assert time.monotonic() < limit, found
        time.sleep(0.02)


def kill_engine(_: px.Worker) -> int:
    """Kill processes as the system does if memory is short; return their number."""
    killed = [one for one in psutil.Process().children(recursive=True) if one.name().startswith("VLLM::")]
    for process in killed:
        process.kill()
    return len(killed)


def lose_half(_: px.Worker) -> None:
    """Let the loads of this rank get half of the tensors."""
    from phalanx.engines.vllm import vllm_runner

    whole = vllm_runner.location_of
    vllm_runner.location_of = lambda tensors: whole(dict([*tensors.items()][::2]))


def test_engines_that_die_fail_a_load_or_are_closed_raise_named_errors_and_leave_nothing(
    cluster: None, models: dict[str, str]
) -> None:
    before = things_of_engines()
    with px.ResourcePool([3], use_gpu=False) as pool:
        source = px.WorkerGroup(pool[0:1], Source.bind(load_model(models["untied"])), env=ONE_THREAD)
        rollout = px.WorkerGroup(pool[1:3], VllmRollout.bind(models["untied"], **SMALL), env=ONE_THREAD)
        two = [len(kind) for kind in left_since(before)]
        for key in "abaa":
            px.engines.sticky(rollout, key).generate([[5]])
        assert [one.requests for one in rollout.engine_statistics()] == [3, 1]

        call = rollout[1].generate.submit([[5]] * 1000, SamplingParams(max_tokens=100, ignore_eos=True))
        while not rollout.engine_statistics()[1].running:
            pass
        assert rollout[1].run(kill_engine) == 1
        with pytest.raises(px.PhalanxError, match=r"since vLLM raised EngineDeadError: .*group\.restart\(\)"):
            call.result()
        px.resize(rollout, 1)
        assert px.engines.sticky(rollout, "b").generate([[5]])[0].tokens
        assert [2 * len(kind) for kind in left_since(before)] == two

        sync = px.WeightSync(source, rollout, "policy")
        rollout.run(lose_half)
        with pytest.raises(px.weights.WeightsError, match=r"vLLM loaded nothing .*group\.restart\(\)"):
            sync()
        with pytest.raises(px.weights.WeightsTorn):
            rollout.generate([[5]])
        rollout.restart()
        assert sync().number == rollout.generate([[5]])[0].version
        assert [2 * len(kind) for kind in left_since(before)] == two
        rollout.close()
        assert not any(left_since(before))
