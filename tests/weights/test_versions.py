"""Versions of weights, the calls that need them, and the report of a sync."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

import phalanx as px
from phalanx.declare.context import WorkerContext
from phalanx.declare.weight_declarations import Accepted, WeightsDeclared
from phalanx.weights.versions import WeightRegistry
from phalanx.weights.weight_ends import WeightSource
from tests.weights.weight_workers import NAME, Actor, Fussy, Rollout, groups, joined, linked, network, same


def statuses(group: px.WorkerGroup) -> list[str]:
    return [str(one) for one in px.weights.status(group, NAME).values()]


class Engine(Fussy):
    @px.register
    def generate(self, prompt: str = "") -> str:
        return f"{prompt} {px.weights.current_version(NAME)}"


class Critic(px.Worker):
    @px.register
    def judge(self) -> int:
        return 7


def test_version_numbers_start_at_one_and_never_decrease() -> None:
    with groups(Actor, Actor, Rollout) as (source, other, target):
        sync, numbers = px.WeightSync(source, target, NAME), list[int]()
        for _ in range(3):
            source.train()
            numbers.append(sync().number)
        source.restart()
        numbers.append(px.WeightSync(source, target, NAME)().number)
        target.restart()
        numbers.append(px.WeightSync(source, target, NAME)().number)
        numbers.append(px.WeightSync(other, target, NAME)().number)

        assert numbers == [1, 2, 3, 4, 5, 6]
        assert target.version() == other.run(lambda _: px.weights.current_version(NAME)) == [6]


def test_some_ranks_of_a_group_can_be_synced_alone() -> None:
    with groups(Actor, Actor, Rollout, sizes=(2, 1, 3)) as (source, other, target):
        px.WeightSync(source[0:1], target[1:2], NAME)()
        px.WeightSync(other, target[2], NAME)()

        assert statuses(target) == ["none", "complete(1)", "complete(1)"]
        assert len({*px.weights.status(target, NAME).values()}) == 2


def test_torn_weights_stop_methods_that_need_weights_until_a_sync_succeeds() -> None:
    with linked(Actor, Engine) as (source, target, sync):
        sync()
        source.train()
        target.refuse(True)
        with pytest.raises(ValueError, match="no room"):
            sync()

        assert statuses(target) == ["torn(2)"]
        for call in (
            lambda: target.generate(),
            lambda: target.generate("hello"),
            lambda: target[0].generate(),
            lambda: source.run(lambda _, view: view.generate(), target),
        ):
            with pytest.raises(px.weights.WeightsTorn, match=r"version 2 .*version 1 before"):
                call()
        assert target.run(lambda worker: worker.refuses) == [True]
        assert target.run(lambda _: px.weights.current_version(NAME)) == [None]
        with pytest.raises(px.RemoteCallError, match=r"DeclarationError: .* has weights \['policy'\]"):
            target.run(lambda _: px.weights.current_version("nothing"))
        target.refuse(False)
        version = sync()
        assert (version.number, version.changed) == (3, 4)  # since the last complete version
        assert target.generate("hello") == ["hello 3"]


def test_no_rank_has_a_version_that_failed_on_another_rank() -> None:
    with linked(Actor, Engine, sizes=(2, 2)) as (_, target, sync):
        sync()
        target[1].call("refuse", True)

        with pytest.raises(ValueError, match="no room"):
            sync()

        assert statuses(target) == ["torn(2)", "torn(2)"]
        with pytest.raises(px.weights.WeightsTorn, match="version 1 before"):
            target[0].generate()
        target.refuse(False)
        sync()
        assert statuses(target) == ["complete(3)", "complete(3)"]


def test_torn_weights_do_not_stop_another_role_of_the_process() -> None:
    with groups(Actor, px.colocate({"rollout": Engine, "critic": Critic})) as (source, target):
        target.rollout.refuse(True)
        with pytest.raises(ValueError, match="no room"):
            px.WeightSync(source, target.rollout, NAME)()

        assert target.critic.judge() == [7]
        with pytest.raises(px.weights.WeightsTorn, match="role 'rollout'"):
            target.rollout.generate()
        with pytest.raises(px.DeclarationError, match=r"role 'critic' .* none \(role 'rollout' has them\)"):
            px.WeightSync(source, target.critic, NAME)()


def test_a_role_needs_all_of_its_weights_and_their_versions_never_decrease() -> None:
    one, other = ("actor", NAME), ("actor", "other")
    model = torch.nn.Linear(1, 1)
    context = WorkerContext(had_weights={one: 5})
    WeightsDeclared.of(context).accepted.update({one: Accepted(model), other: Accepted(None)})
    noted = WeightRegistry(context)
    noted.begin(other, 1)
    noted.finish(other, 1)
    assert "actor" in noted.declared.torn

    for loaded in (None, model):
        noted.loaded("actor", loaded)
        assert ("actor" in noted.declared.torn) == (loaded is None)
        with pytest.raises(px.weights.WeightsError, match="never decrease"):
            noted.begin(one, 3)
    noted.begin(one, 6)
    noted.finish(one, 6)
    assert noted.declared.torn == {}
    noted.publish(one, 7, None, None)
    with pytest.raises(px.weights.WeightsError, match="version 7 was published already"):
        noted.publish(one, 6, None, None)


def test_a_restarted_group_that_had_a_version_needs_a_sync_before_calls() -> None:
    with linked(Actor, Rollout) as (_, target, sync):
        target.restart()
        assert target.version() == [None]
        sync.submit()  # its future is never read
        target.restart()

        assert statuses(target) == ["none"]
        with pytest.raises(px.weights.WeightsTorn, match="restarted after version 1"):
            target.version()
        sync()
        assert target.version() == [2]


class Student(Rollout):
    """A rollout whose accepted model is also its state."""

    def __init__(self) -> None:
        super().__init__()
        px.register_state(self, model=self.model)


def test_a_loaded_model_has_no_version_and_needs_no_sync_after_a_restart(tmp_path: Path) -> None:
    with linked(Actor, Student, delta=True) as (source, target, sync):
        sync()
        px.save(target, tmp_path)
        source.train()
        sync()
        px.load(target, tmp_path)
        assert (target.version(), statuses(target)) == ([None], ["none"])
        source.train()
        sync()
        assert same(target.values()[0], source.values()[0])
        target.restart()
        px.load(target, tmp_path, parts=["rng"])
        with pytest.raises(px.weights.WeightsTorn, match="the constructor's weights"):
            target.version()
        px.load(target, tmp_path)

        assert target.version() == [None]
        px.snapshot(target)
        sync()
        px.restore(target)
        assert target.version() == [None]


def test_changed_tensors_are_counted_and_the_second_sync_without_changes_warns() -> None:
    with linked(Actor, Rollout) as (source, _, sync):
        assert sync().changed == 4
        assert sync().changed == 0
        with pytest.warns(RuntimeWarning, match="2 syncs in a row changed nothing"):
            sync()
        source.train()
        assert sync().changed == 4
        assert sync().changed == 0
        source.run(lambda worker: worker.model[0].bias.data.add_(1))
        assert sync().changed == 1


def test_syncs_of_one_source_share_version_numbers_and_count_changes_separately() -> None:
    with groups(Actor, Rollout, Rollout) as (source, one, other):
        syncs = [px.WeightSync(source, group, NAME) for group in (one, other)]
        for number in (1, 3, 5):
            source.train()
            versions = [sync() for sync in syncs]

            assert [version.changed for version in versions] == [4, 4]
            assert [version.number for version in versions] == [number, number + 1]


def test_the_next_sync_frees_the_state_of_a_dropped_sync_on_the_ranks() -> None:
    def ends() -> int:
        gc.collect()
        return sum(isinstance(one, WeightSource) for one in gc.get_objects())

    with groups(Actor, Rollout) as both:
        before = ends()
        for _ in range(3):
            px.WeightSync(*both, NAME)()
            ends()

        assert ends() - before == 1


@pytest.mark.parametrize("always", [True, False])
def test_a_sync_with_expect_change_warns_at_the_first_sync_without_changes(always: bool) -> None:
    with linked(Actor, Rollout, expect_change=always) as (_, _, sync):
        sync()
        with pytest.warns(RuntimeWarning, match="the sync changed nothing") as told:
            sync(expect_change=None if always else True)

        assert told[0].filename == __file__


def test_weights_of_another_step_than_requested_are_refused_and_not_sent() -> None:
    with linked(Actor, Rollout) as (source, target, sync):
        source.train()
        with pytest.raises(px.weights.WeightsError, match="at step 1, expected step 2"):
            sync(step=2)

        assert statuses(target) == ["none"]
        initial = {name: one.detach() for name, one in network(1).named_parameters()}
        assert same(target.values()[0], initial)
        version = sync(step=1)
        assert (version.step, version.number) == (1, 1)
        assert sync().number == 2  # the number of the refused sync was used again, once

    sides = joined({"w": torch.ones(2)}, {"w": torch.zeros(2)})
    with sides as (sync, _), pytest.raises(px.PhalanxError, match=r"publish_weights\(..., step=function\)"):
        sync(step=1)
