"""What takes too long for a run of CI: more of verl's trainers, the asynchronous ones among them."""

from __future__ import annotations

import math

import pytest

from bench.trainers.running import PHALANX, VERL
from tests.verl.conftest import Runs

pytestmark = pytest.mark.soak

STALENESS = "training/off_policy/trajectory_staleness/max"
"""How many updates the weights that generated a step's answers are behind those of the step."""
VERSION = "fully_async/count/current_param_version"
"""How many updates of weights the rollout has had."""


def test_training_apart_from_generation_ends_with_sane_metrics_and_newer_weights(runs: Runs) -> None:
    ours = runs.of("separate_async", PHALANX)

    assert list(ours.metrics) == [1, 2, 3]
    assert all(math.isfinite(found["actor/pg_loss"]) for found in ours.metrics.values())
    versions = [step - found[STALENESS] for step, found in ours.metrics.items()]
    assert versions == sorted(versions)
    assert versions[-1] > versions[0]


@pytest.mark.parametrize("name", ["separate_async", "one_step_off_policy"])
def test_each_step_of_generation_apart_gets_all_tensors_that_the_model_has(runs: Runs, name: str) -> None:
    assert [found["sync/tensors"] for found in runs.of(name, PHALANX).metrics.values()] == [21, 21, 21]


def test_generation_and_training_that_never_wait_end_with_sane_metrics_and_newer_weights(runs: Runs) -> None:
    theirs, ours = runs.of("fully_async_policy", VERL), runs.of("fully_async_policy", PHALANX)

    for ended in (theirs, ours):
        losses = [found["actor/pg_loss"] for found in ended.metrics.values() if "actor/pg_loss" in found]
        assert losses
        assert all(map(math.isfinite, losses))
        versions = [found[VERSION] for found in ended.metrics.values() if VERSION in found]
        assert versions == sorted(versions)
        assert versions[-1] > versions[0]
