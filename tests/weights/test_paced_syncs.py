"""Syncs of weights that tell a staleness which version is in training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import phalanx as px
from phalanx.channels.staleness_state import StalenessState
from tests.weights.weight_workers import NAME, Actor, Rollout

SOAK_ON_RAY = True


@pytest.fixture
def groups(pool: px.ResourcePool) -> Iterator[tuple[px.WorkerGroup, px.WorkerGroup]]:
    with px.WorkerGroup(pool[0:1], Actor) as actor, px.WorkerGroup(pool[1:2], Rollout) as rollout:
        yield actor, rollout


def generate(staleness: px.StalenessManager, channel: px.Channel, rows: int) -> int:
    with staleness.lease(rows, 0) as lease:
        lease.put(channel, torch.zeros(rows, 1), lease.version)
    return lease.version


def test_each_sync_puts_its_version_into_training_and_new_rows_are_of_it(groups: Any) -> None:
    staleness = px.StalenessManager(max_lag=0, rows_per_version=4)
    with (
        px.WeightSync(*groups, NAME, staleness=staleness) as sync,
        px.Channel() as channel,
    ):
        for number in (1, 2, 3):
            assert sync().number == staleness.version == number
            assert generate(staleness, channel, 4) == number
            with channel.take_rows(4) as batch:
                batch.value()
            groups[0].train()
        sync()
    assert (staleness.stats.lags, staleness.stats.rows.dropped) == ({0: 12}, 0)


def test_the_same_step_sent_again_counts_no_rows_as_trained_on(groups: Any) -> None:
    staleness = px.StalenessManager(max_lag=1, rows_per_version=4)
    with (
        px.WeightSync(*groups, NAME, staleness=staleness) as sync,
        px.Channel() as channel,
    ):
        sync()
        generate(staleness, channel, 4)
        sync()
        assert (staleness.stats.rows.trained, staleness.stats.rows.ready) == (0, 4)
        groups[0].train()
        sync()
        assert staleness.stats.lags == {1: 4}


def test_numbers_go_on_from_a_loaded_staleness(groups: Any) -> None:
    staleness = px.StalenessManager(1, 4)
    px.channels.restore(px.channels.snapshot([], px.StalenessManager(1, 4, version=7)), [], staleness)
    with px.WeightSync(*groups, NAME, staleness=staleness) as sync:
        assert sync().number == 8
    assert staleness.version == 8


@pytest.mark.slow_on_cluster
@pytest.mark.filterwarnings("error")
def test_a_sync_that_fails_leaves_the_staleness_alone_unless_only_a_warning_was_its_error(
    groups: Any,
) -> None:
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


def test_rows_of_a_version_that_a_sync_sends_may_come_before_its_end_is_known() -> None:
    state, answers = StalenessState(max_lag=1, rows_per_version=4), list[tuple[object, ...]]()
    state.lease(("producer", 1), answers.append, 6)
    with pytest.raises(ValueError, match="a row of version 1 was accepted while version 0 is in training"):
        state.accept(("producer", 1), [1, 1])

    state.expect(1)

    assert state.accept(("producer", 1), [1, 1, 1, 1]) == (0, 1, 2, 3)
    with pytest.raises(ValueError, match="a row of version 2"):
        state.accept(("producer", 1), [2])
    state.advance(1, trained=0)
    assert state.stats().rows.ready == 4
