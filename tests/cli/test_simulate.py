"""`phalanx simulate`: a script, unchanged, on a cluster that is a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from phalanx.cli import main

SCRIPT = """
import sys, time
import torch
import phalanx as px

class Trainer(px.Worker):
    def __init__(self, start=0.0):
        self.value = torch.zeros(1) + start

    @px.register(px.Dispatch.ROWS)
    def update(self, rows):
        return rows * 2 + self.value

    @px.register
    def loss(self):
        return {"loss": 0.5}

if __name__ == "__main__":
    px.init(num_cpus=3)
    with px.ResourcePool([4]) as pool:
        group = px.WorkerGroup(pool, Trainer.bind(start=1.0))
        begun = time.perf_counter()
        joined = group.update(torch.ones(2 * group.world_size, 1))
        losses = group.loss()
        print("SAW", group.world_size, joined, losses[-1], round(time.perf_counter() - begun))
        time.sleep(3600)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("simulated") / "train.py"
    path.write_text(SCRIPT)
    return path


def simulated(script: Path, *words: str) -> tuple[str, dict[str, Any]]:
    """What the script printed, and the report."""
    ran = CliRunner().invoke(main.app, ["simulate", str(script), "--json", *words])
    assert ran.exit_code == 0, ran.output
    printed, brace, rest = ran.stdout.partition("{\n")
    return printed, json.loads(brace + rest)


def test_a_script_runs_on_as_many_ranks_as_the_cluster_has_and_its_clock_shows_the_stated_time(
    script: Path,
) -> None:
    printed, made = simulated(
        script, "--nodes", "3", "--ranks-per-node", "8", "--cost", "Trainer.update=2.0s,returns=[1]"
    )
    assert "SAW 24 [1" in printed
    assert "None 2\n" in printed
    assert any("Nothing is stated of Trainer.loss" in note for note in made["notes"])


def test_one_rank_runs_the_real_methods_for_all(script: Path) -> None:
    printed, _ = simulated(script, "--nodes", "2", "--ranks-per-node", "4", "--run", "one")
    assert "{'loss': 0.5}" in printed
    assert "tensor([[3.]" in printed


def test_pools_may_stay_as_the_script_has_them(script: Path) -> None:
    printed, _ = simulated(script, "--nodes", "2", "--ranks-per-node", "4", "--pools", "written")
    assert "SAW 4" in printed


def test_a_trace_of_a_run_gives_the_costs_of_the_next(script: Path, tmp_path: Path) -> None:
    trace = tmp_path / "run.json"
    simulated(script, "--cost", "update=7s", "--cost", "*=0s", "--to", str(trace))
    printed, _ = simulated(script, "--costs", str(trace), "--nodes", "2")
    assert printed.strip().endswith(" 7")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--cost", "update=fast"), "expected a number"),
        (("--cost", "update=1s,length=3"), "expected NAME=SECONDS"),
        (("--cost", "update=1e400s"), "expected a number, 0 or more"),
        (("--cost", "update=1s,fail=200%"), "expected a probability"),
        (("--set", "speed=3"), "there is no constant 'speed'"),
        (("--set", "network_bytes_per_s=0"), "more than 0 bytes a second"),
        (("--node-mtbf-hours", "0"), "more than 0 hours"),
        (("--pool", "rollout=8"), "NODESxRANKS"),
        (("--pools", "written"), "can never be placed"),
    ],
)
def test_what_makes_no_sense_is_said(script: Path, words: tuple[str, ...], says: str) -> None:
    ran = CliRunner().invoke(main.app, ["simulate", str(script), "--ranks-per-node", "2", *words])
    assert ran.exit_code == main.FAILED
    assert says in ran.output


def test_what_is_stated_of_nothing_is_told(script: Path) -> None:
    _, made = simulated(script, "--cost", "Trainer.updat=1s", "--cost", "*=0s", "--pool", "rollout=1x2")
    assert "Costs of methods that nobody called: Trainer.updat." in made["notes"]
    assert "Shapes of pools that were not made: rollout." in made["notes"]


def test_a_script_that_raises_is_told_with_its_line_and_the_report_of_what_it_did(
    script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ran = CliRunner().invoke(main.app, ["simulate", str(script), "--cost", "Trainer.update=1s,fail=100%"])
    assert ran.exit_code == 1
    told = ran.output + capfd.readouterr().err
    assert "joined = group.update(torch.ones(2 * group.world_size, 1))" in told
    assert "fails by chance" in told
    assert "Failures" in told


def test_long_tables_are_whole_where_all_is_asked_for(script: Path) -> None:
    words = ["simulate", str(script), "--ranks-per-node", "20"]
    assert "--all shows them" in CliRunner().invoke(main.app, words).output
    assert "--all shows them" not in CliRunner().invoke(main.app, [*words, "--all"]).output
