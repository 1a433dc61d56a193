"""verl's own programs, unmodified, give the same numbers under both controllers."""

from __future__ import annotations

import re

import pytest

from bench.trainers.running import PHALANX, VERL, differences
from tests.verl.conftest import Runs

STEPS = {"sft": [1, 2, 3, 4], "sft_resumed": [3, 4], "main_ppo": [1, 2, 3], "main_ppo_v0": [1, 2, 3]}
VALUES = {"sft": 20, "sft_resumed": 10}
"""Least number of compared values. Other programs have at least 150."""


@pytest.mark.parametrize("name", [*STEPS, pytest.param("main_ppo_critic", marks=pytest.mark.soak)])
def test_every_metric_of_a_program_equals_the_metric_under_verls_controller(runs: Runs, name: str) -> None:
    theirs, ours = runs.of(name, VERL), runs.of(name, PHALANX)

    assert list(ours.metrics) == list(theirs.metrics) == STEPS.get(name, [1, 2, 3])
    assert len(theirs.values()) >= VALUES.get(name, 150)
    assert differences(theirs, ours) == []


@pytest.mark.parametrize(("name", "worker"), [("sft", "TrainingWorker"), ("main_ppo", "WorkerDict")])
def test_the_output_of_ranks_has_phalanxs_prefix_only_under_phalanx(
    runs: Runs, name: str, worker: str
) -> None:
    theirs, ours = runs.of(name, VERL), runs.of(name, PHALANX)

    line_of_a_rank = re.compile(rf"\[{worker} r[01-]+@")  # after Ray's prefix if the trainer is an actor
    assert line_of_a_rank.search(ours.text)
    assert f"({worker} pid=" not in ours.text
    assert not line_of_a_rank.search(theirs.text)


@pytest.mark.parametrize(
    ("name", "group", "methods"),
    [
        ("sft", "TrainingWorker", ["train_batch"]),
        ("main_ppo", "WorkerDict", ["update_actor", "update_weights"]),
    ],
)
def test_the_trace_of_a_program_has_verls_groups_and_methods(
    runs: Runs, name: str, group: str, methods: list[str]
) -> None:
    runs.of(name, PHALANX)

    trace = runs.trace(runs.folder / f"{name}-{PHALANX}").read_text()
    assert group in trace
    assert [method for method in methods if method not in trace] == []


def test_a_resumed_run_has_the_metrics_of_the_uninterrupted_run(runs: Runs) -> None:
    whole, resumed = runs.of("sft", PHALANX), runs.of("sft_resumed", PHALANX)

    names = ("train/loss", "train/grad_norm", "train/lr")
    for step in STEPS["sft_resumed"]:
        assert [resumed.metrics[step][name] for name in names] == [
            whole.metrics[step][name] for name in names
        ]
