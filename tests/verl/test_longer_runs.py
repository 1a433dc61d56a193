"""What takes too long for a run of CI: more of verl's trainers, the asynchronous ones among them."""

from __future__ import annotations

import math

import pytest

from bench.trainers.running import PHALANX, VERL, differences
from tests.verl.conftest import Runs

pytestmark = pytest.mark.soak

STALENESS = "training/off_policy/trajectory_staleness/max"
"""How many updates the weights that generated a step's answers are behind those of the step."""


def test_every_metric_with_a_critic_is_the_one_under_verls_controller(runs: Runs) -> None:
    theirs, ours = runs.of("main_ppo_critic", VERL), runs.of("main_ppo_critic", PHALANX)

    assert list(ours.metrics) == [1, 2, 3]
    assert len(theirs.values()) >= 150
    assert differences(theirs, ours) == []


@pytest.mark.parametrize("name", ["separate_async", "separate_async_phalanx"])
def test_training_apart_from_generation_ends_with_sane_metrics_and_newer_weights(
    runs: Runs, name: str
) -> None:
    ours = runs.of(name, PHALANX)

    assert list(ours.metrics) == [1, 2, 3]
    assert all(math.isfinite(found["actor/pg_loss"]) for found in ours.metrics.values())
    assert [found["sync/tensors"] for found in ours.metrics.values()] == [
        21,
        21,
        21,
    ]  # all that the model has
    versions = [step - found[STALENESS] for step, found in ours.metrics.items()]
    assert versions == sorted(versions)
    assert versions[-1] > versions[0]


@pytest.mark.parametrize("name", ["one_step_off_policy", "fully_async_policy"])
def test_an_experiment_of_verls_ends_as_it_does_under_verls_controller(runs: Runs, name: str) -> None:
    codes: dict[str, int] = {}
    for controller in (VERL, PHALANX):
        running = runs.begin(runs.program(name), controller, runs.folder / f"{name}-{controller}")
        codes[controller] = running.result(420).code
        print(f"{name} under {controller} ended with {codes[controller]}:\n{running.tail(60)}")

    assert codes[PHALANX] == codes[VERL]
