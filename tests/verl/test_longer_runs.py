"""What takes too long for a run of CI: more of verl's trainers, the asynchronous ones among them."""

from __future__ import annotations

import math

import pytest

from bench.trainers.running import PHALANX, VERL, differences
from tests.verl.conftest import Runs

pytestmark = pytest.mark.soak

STALENESS = "training/off_policy/trajectory_staleness/max"
"""How many updates the weights that generated a step's answers are behind those of the step."""
VERSION = "fully_async/count/current_param_version"
"""How many updates of weights the rollout has had."""


def test_every_metric_with_a_critic_is_the_one_under_verls_controller(runs: Runs) -> None:
    theirs, ours = runs.of("main_ppo_critic", VERL), runs.of("main_ppo_critic", PHALANX)

    assert list(ours.metrics) == [1, 2, 3]
    assert len(theirs.values()) >= 150
    assert differences(theirs, ours) == []


def test_training_apart_from_generation_ends_with_sane_metrics_and_newer_weights(runs: Runs) -> None:
    ours = runs.of("separate_async", PHALANX)

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


def test_every_metric_of_generation_one_step_ahead_is_the_one_under_verls_controller(runs: Runs) -> None:
    theirs, ours = runs.of("one_step_off_policy", VERL), runs.of("one_step_off_policy", PHALANX)

    assert list(ours.metrics) == [1, 2, 3]
    assert len(theirs.values()) >= 100
    assert differences(theirs, ours) == []
    assert [found["sync/tensors"] for found in ours.metrics.values()] == [21, 21, 21]


def test_generation_and_training_that_never_wait_end_with_sane_metrics_and_newer_weights(runs: Runs) -> None:
    theirs, ours = runs.of("fully_async_policy", VERL), runs.of("fully_async_policy", PHALANX)

    for ended in (theirs, ours):
        losses = [found["actor/pg_loss"] for found in ended.metrics.values() if "actor/pg_loss" in found]
        assert losses
        assert all(map(math.isfinite, losses))
        versions = [found[VERSION] for found in ended.metrics.values() if VERSION in found]
        assert versions == sorted(versions)
        assert versions[-1] > versions[0]
