"""Weights that are staged beside what targets do, and committed between their calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import phalanx as px

SOAK_ON_RAY = True


class Trainer(px.Worker):
    """Publishes a network with tied weights; training adds one to it."""

    def __init__(self, width: int = 16) -> None:
        self.model = _network(width)
        self.steps = 0
        self.publish_weights("policy", self.model, step=lambda: self.steps)

    @px.register
    def train(self) -> None:
        self.steps += 1
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1.0)

    @px.register
    def total(self) -> float:
        return _total(self.model)


class Generator(px.Worker):
    """Accepts such a network."""

    def __init__(self, width: int = 16, **accepting: Any) -> None:
        self.model = _network(width)
        self.accept_weights("policy", self.model, **accepting)

    @px.register
    def total(self) -> float:
        return _total(self.model)

    @px.register
    def version(self) -> int | None:
        return px.weights_version("policy")

    @px.register
    def tied(self) -> bool:
        return self.model["a"].weight is self.model["b"].weight

    @px.register
    def memory(self) -> list[int]:
        return sorted(parameter.data_ptr() for parameter in self.model.parameters())


class Loader(px.Worker):
    """Hands what comes to a function, which can be told to fail."""

    def __init__(self) -> None:
        self.got: dict[str, torch.Tensor] = {}
        self.fails = False
        self.accept_weights("policy", load=self.load)

    def load(self, pairs: Any) -> None:
        if self.fails:
            raise ValueError("the engine is asleep")
        self.got = {name: tensor.clone() for name, tensor in pairs}

    @px.register(needs_weights=False)
    def fail(self) -> None:
        self.fails = not self.fails

    @px.register
    def names(self) -> list[str]:
        return sorted(self.got)


def _network(width: int) -> torch.nn.ModuleDict:
    torch.manual_seed(0)
    made = torch.nn.ModuleDict({key: torch.nn.Linear(width, width) for key in "abc"})
    made["b"].weight = made["a"].weight
    return made


def _total(model: torch.nn.Module) -> float:
    return sum(float(parameter.detach().sum(dtype=torch.float64)) for parameter in model.parameters())


@pytest.fixture
def trainer(pool: px.ResourcePool) -> Iterator[px.WorkerGroup]:
    with px.WorkerGroup(pool[0:2], Trainer) as made:
        yield made


@pytest.fixture
def generator(pool: px.ResourcePool) -> Iterator[px.WorkerGroup]:
    with px.WorkerGroup(pool[2:4], Generator) as made:
        yield made


@pytest.fixture
def sync(trainer: px.WorkerGroup, generator: px.WorkerGroup) -> Iterator[px.WeightSync]:
    with px.WeightSync(trainer, generator, "policy", verify="full") as made:
        yield made


def test_what_is_staged_is_not_seen_before_the_commit(
    trainer: px.WorkerGroup, generator: px.WorkerGroup, sync: px.WeightSync
) -> None:
    before = generator.total()
    trainer.train()
    staged = sync.stage(step=1).result()

    assert (generator.total(), generator.version()) == (before, [None, None])
    committed = sync.commit()
    assert (generator.total(), generator.version()) == (trainer.total(), [committed.number] * 2)
    assert (committed.number, committed.step, committed.changed) == (staged.number, 1, staged.changed)


@pytest.mark.slow_on_cluster
def test_a_commit_gives_parameters_the_staged_memory_and_copies_nothing(
    trainer: px.WorkerGroup, generator: px.WorkerGroup, sync: px.WeightSync
) -> None:
    memory: list[list[list[int]]] = []
    for _ in range(3):
        trainer.train()
        sync.stage().result()
        sync.commit()
        memory.append(generator.memory())

    assert memory[0] == memory[2] != memory[1]
    assert "a commit swaps the storage of 10 tensors" in str(sync.explain())


def test_tied_parameters_stay_one(
    trainer: px.WorkerGroup, generator: px.WorkerGroup, sync: px.WeightSync
) -> None:
    for _ in range(2):
        trainer.train()
        sync.stage().result()
        sync.commit()

    assert generator.tied() == [True, True]
    assert generator.total() == trainer.total()


def test_memory_that_must_stay_is_copied_into(pool: px.ResourcePool, trainer: px.WorkerGroup) -> None:
    with (
        px.WorkerGroup(pool[2:4], Generator.bind(swap=False)) as generator,
        px.WeightSync(trainer, generator, "policy") as sync,
    ):
        before = generator.memory()
        trainer.train()
        sync.stage().result()
        sync.commit()

        assert (generator.memory(), generator.total()) == (before, trainer.total())
        assert "a commit copies 10 tensors" in str(sync.explain())


@pytest.mark.slow_on_cluster
def test_what_loads_gets_the_weights_with_the_commit(pool: px.ResourcePool, trainer: px.WorkerGroup) -> None:
    with (
        px.WorkerGroup(pool[2:4], Loader) as loader,
        px.WeightSync(trainer, loader, "policy") as sync,
    ):
        sync.stage().result()
        before = loader.names()
        sync.commit()

        assert before == [[], []]
        assert loader.names() == [["a.bias", "a.weight", "b.bias", "b.weight", "c.bias", "c.weight"]] * 2


def test_a_commit_that_fails_leaves_torn_weights_which_the_next_one_heals(
    pool: px.ResourcePool, trainer: px.WorkerGroup
) -> None:
    with (
        px.WorkerGroup(pool[2:4], Loader) as loader,
        px.WeightSync(trainer, loader, "policy") as sync,
    ):
        loader.fail()
        sync.stage().result()
        with pytest.raises(ValueError, match="asleep"):
            sync.commit()
        with pytest.raises(px.WeightsTorn):
            loader.names()

        loader.fail()
        sync.stage().result()
        assert sync.commit().number == 2
        assert [str(one) for one in px.weights(loader, "policy").values()] == ["whole(2)"] * 2


def test_the_next_stage_replaces_what_was_not_committed(
    trainer: px.WorkerGroup, generator: px.WorkerGroup, sync: px.WeightSync
) -> None:
    sync.stage().result()
    trainer.train()
    sync.stage()

    assert sync.commit().number == 2
    assert generator.total() == trainer.total()
    with pytest.raises(px.DeclarationError, match="nothing of weights 'policy' is staged"):
        sync.commit()


def test_a_sync_replaces_what_was_not_committed(
    trainer: px.WorkerGroup, generator: px.WorkerGroup, sync: px.WeightSync
) -> None:
    sync.stage().result()
    trainer.train()
    assert sync().number == 2
    with pytest.raises(px.DeclarationError, match="staged"):
        sync.commit()
    assert generator.total() == trainer.total()


def test_a_restart_of_the_target_drops_what_is_staged(
    trainer: px.WorkerGroup, generator: px.WorkerGroup, sync: px.WeightSync
) -> None:
    sync.stage().result()
    generator.restart()
    with pytest.raises(px.WeightsError, match="other processes than when it was staged"):
        sync.commit()

    sync.stage().result()
    assert sync.commit().number == 2
    assert generator.total() == trainer.total()


def test_a_stage_of_another_step_leaves_everything_as_it_was(
    trainer: px.WorkerGroup, generator: px.WorkerGroup, sync: px.WeightSync
) -> None:
    sync()
    trainer.train()
    with pytest.raises(px.WeightsError, match="at step 1, but step 7"):
        sync.stage(step=7).result()
    assert [str(one) for one in px.weights(generator, "policy").values()] == ["whole(1)"] * 2

    sync.stage(step=1).result()
    sync.commit()
    assert generator.total() == trainer.total()
    sync.stage().result()
    assert sync.commit().number == 3  # the number of the refused stage was given again, but once


def test_parameters_that_are_the_sources_own_cannot_be_staged(pool: px.ResourcePool) -> None:
    group = px.colocate({"actor": Trainer, "rollout": Generator.bind(share=True)})
    with (
        px.WorkerGroup(pool[0:2], group) as both,
        px.WeightSync(both.actor, both.rollout, "policy") as sync,
        pytest.raises(px.DeclarationError, match="share=True"),
    ):
        sync.stage()


def test_nothing_is_left_of_the_threads_once_the_sync_is_closed(sync: px.WeightSync) -> None:
    sync.stage().result()
    sync.close()

    assert not [one for one in threading.enumerate() if one.name == "phalanx-staged-weights"]
