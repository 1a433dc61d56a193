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

from tests.engines.vllm.conftest import engine_processes, folders_of_sockets, refuses, shared_memory
from tests.engines.vllm.kinds import KINDS

ROOT = Path(__file__).resolve().parents[3]


DRIVER = """
import json, os, sys, time
import psutil
import phalanx as px
from tests.engines.vllm.kinds import made
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


def lives(pid: int) -> bool:
    """Whether there is such a process, and it is more than the memory of one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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
    while time.monotonic() < deadline and (
        shared_memory() - before[0] or folders_of_sockets() - before[1] or any(map(lives, told["pids"]))
    ):
        time.sleep(0.05)
    assert told["pids"] and not [pid for pid in told["pids"] if lives(pid)]
    assert shared_memory() <= before[0]
    assert folders_of_sockets() <= before[1]
    for place in map(urlparse, told["urls"]):
        assert refuses(place.hostname or "", place.port or 0)


def test_a_driver_that_is_killed_leaves_nothing(models: dict[str, str], tmp_path: Path) -> None:
    before = shared_memory(), folders_of_sockets()

    check_that_nothing_is_left_of_one_that_is_killed(tmp_path, models["untied"], KINDS[1], before)


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
@pytest.mark.parametrize("kind", KINDS)
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
