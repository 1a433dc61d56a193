"""`phalanx replay FILE`, with and without the debugger."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKERS = """
import phalanx as px

class Divider(px.Worker):
    @px.register
    def divide(self, by):
        share = self.world_size / by
        return share

    @px.register
    async def later(self, x):
        doubled = 2 * x
        return doubled
"""
DRIVER = """
import phalanx as px
from workers import Divider

with px.ResourcePool([3], use_gpu=False, backend="inline") as pool, px.WorkerGroup(pool, Divider) as group:
    with group.record("good.pkl", rank=1, calls=2):
        group.divide(2)
        group.later(4)
    with group.record("bad.pkl", rank=2, when="error"):
        try:
            group.divide(0)
        except ZeroDivisionError:
            pass
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recordings, made by a process of its own."""
    path = tmp_path_factory.mktemp("replay")
    (path / "workers.py").write_text(WORKERS)
    (path / "driver.py").write_text(DRIVER)
    subprocess.run([sys.executable, "driver.py"], cwd=path, check=True)
    return path


def replay(folder: Path, *args: str, typed: str = "") -> Any:
    command = [sys.executable, "-m", "phalanx", "replay", *args]
    return subprocess.run(command, cwd=folder / "..", input=typed, capture_output=True, text=True)


def test_the_value_is_printed_and_what_was_recorded_said(folder: Path) -> None:
    ran = replay(folder, f"{folder}/good.pkl", "--method", "divide")

    assert (ran.returncode, ran.stdout) == (0, "1.5\n")
    assert "rank 1 of 3" in ran.stderr
    assert "workers.Divider" in ran.stderr


def test_the_debugger_stops_where_it_raised(folder: Path) -> None:
    ran = replay(folder, f"{folder}/bad.pkl", "--pdb", typed="p by, self.rank\nq\n")

    assert ran.returncode == 1
    assert "(0, 2)" in ran.stdout
    assert "ZeroDivisionError" in ran.stderr
    assert "replaying.py" not in ran.stderr


@pytest.mark.parametrize(
    ("method", "line"), [("divide", "share = self.world_size / by"), ("later", "doubled = 2 * x")]
)
def test_the_debugger_stops_at_the_first_line(folder: Path, method: str, line: str) -> None:
    ran = replay(folder, f"{folder}/good.pkl", "--break", "-m", method, typed="p self.rank\nc\n")

    assert f"-> {line}" in ran.stdout
    assert "\n(Pdb) 1" in ran.stdout
    assert ran.returncode == 0


def test_showing_runs_nothing(folder: Path) -> None:
    ran = replay(folder, f"{folder}/bad.pkl", "--show", "--json")

    facts = json.loads(ran.stdout)
    assert (facts["rank"], facts["calls"][0]["error"]) == (2, "ZeroDivisionError: division by zero")


def test_the_result_as_json(folder: Path) -> None:
    ran = replay(folder, f"{folder}/good.pkl", "--json")

    assert json.loads(ran.stdout)["value"] == "8"


def test_a_call_that_is_not_in_the_file(folder: Path) -> None:
    ran = replay(folder, f"{folder}/good.pkl", "-m", "nothing")

    assert (ran.returncode, "it has: divide, later" in ran.stderr) == (2, True)


def test_leaving_the_debugger_prints_no_value(folder: Path) -> None:
    ran = replay(folder, f"{folder}/good.pkl", "--break", "-m", "divide", typed="q\n")

    assert (ran.returncode, ran.stdout.rstrip().endswith("(Pdb)")) == (0, True)
