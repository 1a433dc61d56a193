"""Runs of verl's trainers that take too long for CI, with asynchronous trainers."""

from __future__ import annotations

import math

import pytest

from bench.trainers.running import PHALANX, VERL
from tests.verl.conftest import Runs

pytestmark = pytest.mark.soak

STALENESS = "training/off_policy/trajectory_staleness/max"
"""Number of updates between the weights that generated a step's answers and the step's weights."""
VERSION = "fully_async/count/current_param_version"
"""Number of updates of weights that the rollout received."""


def test_separate_async_training_has_newer_weights(runs: Runs) -> None:
    ours = runs.of("separate_async", PHALANX)

    assert list(ours.metrics) == [1, 2, 3]
    versions = [step - found[STALENESS] for step, found in ours.metrics.items()]
    assert versions == sorted(versions)
    assert versions[-1] > versions[0]


@pytest.mark.parametrize("name", ["separate_async", "one_step_off_policy"])
def test_each_step_trains_and_syncs_all_tensors_to_a_separate_rollout(runs: Runs, name: str) -> None:
    steps = runs.of(name, PHALANX).metrics.values()
    assert all(math.isfinite(found["actor/pg_loss"]) for found in steps)
    assert [found["sync/tensors"] for found in steps] == [21, 21, 21]


def test_fully_async_training_has_finite_losses_and_newer_weights(runs: Runs) -> None:
    theirs, ours = runs.of("fully_async_policy", VERL), runs.of("fully_async_policy", PHALANX)

    for ended in (theirs, ours):
        losses = [found["actor/pg_loss"] for found in ended.metrics.values() if "actor/pg_loss" in found]
        assert losses
        assert all(map(math.isfinite, losses))
        versions = [found[VERSION] for found in ended.metrics.values() if VERSION in found]
        assert versions == sorted(versions)
        assert versions[-1] > versions[0]
