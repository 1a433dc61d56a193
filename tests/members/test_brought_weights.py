"""Replacement ranks get their peers' weights before their first call, or refuse work."""

from __future__ import annotations

import logging
import threading
from typing import ClassVar

import pytest
import torch

import phalanx as px
from phalanx.testing import faults
from tests.support.fault_workers import lose
from tests.weights.weight_workers import NAME, Actor, Loading, Rollout, network, same

SLOW_ON_RAY = True


class Engine(Rollout):
    """A rollout whose state is a random generator."""

    def __init__(self) -> None:
        super().__init__()
        self.random = torch.Generator().manual_seed(self.rank)
        px.register_state(self, random=self.random)


class Silent(px.Worker):
    """Publishes weights without a step."""

    def __init__(self) -> None:
        self.publish_weights(NAME, network(0))


class Asked(Loading):
    """Calls its own group from another thread while weights are loaded."""

    group: px.WorkerGroup | None = None
    refused: ClassVar[list[str]] = []

    def loaded(self) -> None:
        asking = threading.Thread(target=self.ask)
        asking.start()
        asking.join(10)

    def ask(self) -> None:
        if self.group is not None:
            try:
                self.group.version()
            except px.GroupBroken as error:
                self.refused.append(str(error))


def test_a_new_rank_has_the_version_of_its_peers_before_it_is_called(three: px.ResourcePool) -> None:
    actor, engines = px.WorkerGroup(three[0:1], Actor), px.WorkerGroup(three, Engine)
    with px.WeightSync(actor, engines, NAME) as sync:
        actor.train()
        before = sync().number
        lose(engines, 1, call=engines.values)

        assert px.replace_ranks(engines, state="none") == (1,)

        versions = engines.version()
        assert len(set(versions)) == 1
        assert versions[0] >= before
        assert all(same(one, actor.values()[0]) for one in engines.values())
        actor.train()
        assert sync().number > versions[0]


def test_a_replace_policy_syncs_all_ranks_to_the_current_weights_of_the_source(here: px.ResourcePool) -> None:
    actor = px.WorkerGroup(here[0:1], Actor)
    engines = px.WorkerGroup(here, Engine, on_failure=px.ReplacePolicy())
    with px.WeightSync(actor, engines, NAME) as sync:
        before = sync().number
        px.snapshot(engines)
        actor.train()
        lose(engines, 2, call=engines.values)

        found = engines.values()

        assert (engines.state, engines.epoch) == ("ready", 1)
        assert all(same(one, actor.values()[0]) for one in found)
        assert set(engines.version()) == {before + 1}


def test_a_group_that_was_never_synced_keeps_its_initial_weights(here: px.ResourcePool) -> None:
    actor, engines = px.WorkerGroup(here[0:1], Actor), px.WorkerGroup(here, Engine)
    with px.WeightSync(actor, engines, NAME):
        before = engines.values()[0]
        lose(engines, 0, call=engines.values)

        px.replace_ranks(engines, state="none")

        assert all(same(one, before) for one in engines.values())


def replaced(engines: px.WorkerGroup, caplog: pytest.LogCaptureFixture) -> str:
    """Replace rank 1, which gets no weights and refuses work; return the warning."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "phalanx"):
        px.replace_ranks(engines, [1], state="none")
    with pytest.raises(px.weights.WeightsTorn, match="Sync them first") as raised:
        engines.values()
    assert isinstance(raised.value, px.RemoteCallError) and raised.value.cause_ranks == (1,)
    (said,) = [one.getMessage() for one in caplog.records if "did not receive weights" in one.getMessage()]
    assert "ranks [1]" in said
    return said


def test_a_dead_broken_restarted_or_closed_source_or_a_closed_sync_gives_new_ranks_no_weights(
    here: px.ResourcePool, caplog: pytest.LogCaptureFixture
) -> None:
    actor = px.WorkerGroup(here[0:1], Actor)
    engines, others = px.WorkerGroup(here, Engine), px.WorkerGroup(here, Engine)
    with px.WeightSync(actor, others, NAME) as sync:
        sync()
    assert "no px.WeightSync that sent them exists" in replaced(others, caplog)

    with px.WeightSync(actor, engines, NAME) as sync:
        sync()
        faults.kill(actor, 0)  # before the driver notices
        assert "their sync failed" in replaced(engines, caplog)
        with pytest.raises(px.PhalanxError):
            actor.train()
        assert "is broken" in replaced(engines, caplog)

        actor.restart()
        assert "restarted after the last sync" in replaced(engines, caplog)

        number = sync().number  # with the weights of the restarted source
        px.replace_ranks(engines, [2], state="none")
        assert engines.version() == [number + 1] * 3
        assert all(same(one, actor.values()[0]) for one in engines.values())

        actor.close()
        assert "is closed" in replaced(engines, caplog)


def test_the_sync_of_the_current_version_syncs_new_ranks(here: px.ResourcePool) -> None:
    first, second = px.WorkerGroup(here[0:1], Actor), px.WorkerGroup(here[0:1], Actor)
    engines = px.WorkerGroup(here, Engine)
    with px.WeightSync(first, engines, NAME) as earlier, px.WeightSync(second, engines, NAME) as later:
        first.train()
        earlier()
        later()

        px.replace_ranks(engines, [0], state="none")

        assert all(same(one, second.values()[0]) for one in engines.values())


def test_calls_are_refused_until_new_ranks_have_weights(here: px.ResourcePool) -> None:
    actor, engines = px.WorkerGroup(here[0:1], Actor), px.WorkerGroup(here, Asked)
    with px.WeightSync(actor, engines, NAME) as sync:
        sync()
        Asked.group = engines

        px.replace_ranks(engines, [1], state="none")

    assert Asked.refused
    assert all("takes no calls until" in one for one in Asked.refused)


def test_a_sync_for_a_new_rank_counts_no_rows_as_trained(here: px.ResourcePool) -> None:
    actor, engines = px.WorkerGroup(here[0:1], Silent), px.WorkerGroup(here, Rollout)
    staleness = px.StalenessManager(max_lag=1, rows_per_version=4)
    with px.Channel() as channel, px.WeightSync(actor, engines, NAME, staleness=staleness) as sync:
        sync()
        with staleness.lease(4, timeout=0) as lease:
            lease.put(channel, torch.zeros(4, 1), lease.version)

        px.replace_ranks(engines, [1], state="none")

        assert staleness.stats.rows.trained == 0
        assert staleness.version == engines.version()[0]
