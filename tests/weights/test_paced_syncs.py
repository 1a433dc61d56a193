"""Syncs that report the version in training to a staleness manager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import phalanx as px
from phalanx.channels.staleness_state import StalenessState
from tests.weights.weight_workers import NAME, Actor, Rollout

SOAK_ON_RAY = True


@pytest.fixture
def groups(two: px.ResourcePool) -> tuple[px.WorkerGroup, px.WorkerGroup]:
    return px.WorkerGroup(two[0:1], Actor), px.WorkerGroup(two[1:2], Rollout)


def generate(staleness: px.StalenessManager, channel: px.Channel, rows: int) -> int:
    with staleness.lease(rows, 0) as lease:
        lease.put(channel, torch.zeros(rows, 1), lease.version)
    return lease.version


def test_each_sync_sets_the_version_in_training_and_of_new_rows(groups: Any) -> None:
    staleness = px.StalenessManager(max_lag=0, rows_per_version=4)
    with px.WeightSync(*groups, NAME, staleness=staleness) as sync, px.Channel() as channel:
        for number in (1, 2, 3):
            assert sync().number == staleness.version == number
            assert generate(staleness, channel, 4) == number
            with channel.take_rows(4) as batch:
                batch.value()
            groups[0].train()
        sync()
    assert (staleness.stats.lags, staleness.stats.rows.dropped) == ({0: 12}, 0)


def test_a_repeated_sync_of_one_step_counts_no_rows_as_trained(groups: Any) -> None:
    staleness = px.StalenessManager(max_lag=1, rows_per_version=4)
    with px.WeightSync(*groups, NAME, staleness=staleness) as sync, px.Channel() as channel:
        sync()
        generate(staleness, channel, 4)
        sync()
        assert (staleness.stats.rows.trained, staleness.stats.rows.ready) == (0, 4)
        groups[0].train()
        sync()
        assert staleness.stats.lags == {1: 4}


def test_version_numbers_continue_from_a_restored_staleness_manager(groups: Any) -> None:
    staleness = px.StalenessManager(1, 4)
    px.channels.restore(px.channels.snapshot([], px.StalenessManager(1, 4, version=7)), [], staleness)
    with px.WeightSync(*groups, NAME, staleness=staleness) as sync:
        assert sync().number == 8
    assert staleness.version == 8


@pytest.mark.slow_on_cluster
@pytest.mark.filterwarnings("error")
def test_a_failed_sync_keeps_the_version_in_training_unless_its_error_was_a_warning(groups: Any) -> None:
    staleness = px.StalenessManager(max_lag=0, rows_per_version=4)
    with px.WeightSync(*groups, NAME, staleness=staleness) as sync:
        sync()
        with pytest.raises(px.weights.WeightsError):
            sync(step=5)
        assert staleness.version == 1
        groups[0].train()
        assert sync(step=1).number == staleness.version == 2
        with pytest.raises(RuntimeWarning, match="changed nothing"):
            sync(expect_change=True)
        assert staleness.version == 3


def test_rows_of_a_version_that_is_being_synced_are_accepted_before_the_sync_ends() -> None:
    state, answers = StalenessState(max_lag=1, rows_per_version=4), list[object]()
    state.lease(("producer", 1), answers.append, 6)
    with pytest.raises(ValueError, match="a row of version 1 was accepted while version 0 is in training"):
        state.accept(("producer", 1), [1, 1])

    state.expect(1)

    assert state.accept(("producer", 1), [1, 1, 1, 1]) == (0, 1, 2, 3)
    with pytest.raises(ValueError, match="a row of version 2"):
        state.accept(("producer", 1), [2])
    state.advance(1, trained=0)
    assert state.stats().rows.ready == 4
