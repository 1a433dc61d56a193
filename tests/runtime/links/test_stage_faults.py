"""Stages beside long calls, and with ranks that die in the middle: on Ray, where calls and deaths are real."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx as px

pytestmark = pytest.mark.slow

ELEMENTS = 100_000


class Trainer(px.Worker):
    """Publishes a tensor; can be told to die once it is asked for it."""

    def __init__(self) -> None:
        self.weight = torch.nn.Linear(ELEMENTS, 1, bias=False)
        torch.nn.init.constant_(self.weight.weight, 1.0)
        self.dies = False
        self.publish_weights("policy", self._model)

    def _model(self) -> Any:
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.weight

    @px.register
    def train(self) -> None:
        with torch.no_grad():
            self.weight.weight.add_(1.0)

    @px.register
    def die_when_asked(self) -> None:
        self.dies = self.rank == 1


class Generator(px.Worker):
    def __init__(self) -> None:
        self.weight = torch.nn.Linear(ELEMENTS, 1, bias=False)
        torch.nn.init.zeros_(self.weight.weight)
        self.accept_weights("policy", self.weight)

    @px.register
    def values(self) -> set[float]:
        return set(self.weight.weight.detach().reshape(-1).tolist())

    @px.register
    def values_until(self, path: str) -> set[float]:
        """What the weights are in the course of a call that ends when a file is there."""
        seen = set[float]()
        while not os.path.exists(path):
            seen |= self.values()
        return seen

    @px.register
    def die(self) -> None:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def ray_pool(ray_cluster: None) -> Iterator[px.ResourcePool]:
    with px.ResourcePool([4], use_gpu=False, backend="ray") as made:
        yield made


@pytest.fixture
def trainer(ray_pool: px.ResourcePool) -> Iterator[px.WorkerGroup]:
    with px.WorkerGroup(ray_pool[0:2], Trainer) as made:
        yield made


@pytest.fixture
def generator(ray_pool: px.ResourcePool) -> Iterator[px.WorkerGroup]:
    with px.WorkerGroup(ray_pool[2:4], Generator) as made:
        yield made


@pytest.fixture
def sync(trainer: px.WorkerGroup, generator: px.WorkerGroup) -> Iterator[px.WeightSync]:
    with px.WeightSync(trainer, generator, "policy", verify="full", bucket_bytes=1 << 16) as made:
        made.stage().result()
        made.commit()
        yield made


def test_a_long_call_of_the_target_goes_on_with_the_weights_that_it_has(
    trainer: px.WorkerGroup, generator: px.WorkerGroup, sync: px.WeightSync, tmp_path: Path
) -> None:
    trainer.train()
    running = generator.values_until.submit(str(tmp_path / "over"))
    sync.stage().result(timeout=30.0)
    (tmp_path / "over").touch()

    assert running.result() == [{1.0}, {1.0}]
    sync.commit()
    assert generator.values() == [{2.0}, {2.0}]


def test_a_source_that_dies_leaves_the_version_before_whole(
    trainer: px.WorkerGroup, generator: px.WorkerGroup, sync: px.WeightSync
) -> None:
    trainer.die_when_asked()
    with pytest.raises(px.WorkerDiedError):
        sync.stage().result(timeout=30.0)
    assert [str(one) for one in px.weights(generator, "policy").values()] == ["whole(1)"] * 2
    assert generator.values() == [{1.0}, {1.0}]

    trainer.restart()
    trainer.train()
    sync.stage().result(timeout=30.0)
    assert sync.commit().number == 3
    assert generator.values() == [{2.0}, {2.0}]


def test_a_target_that_dies_fails_the_stage_at_once(
    trainer: px.WorkerGroup, generator: px.WorkerGroup, sync: px.WeightSync
) -> None:
    with pytest.raises(px.WorkerDiedError):
        generator.die()
    began = time.monotonic()
    with pytest.raises(px.PhalanxError):
        sync.stage().result(timeout=30.0)
    assert time.monotonic() - began < 5.0

    generator.restart()
    assert sync().number > 1
    assert generator.values() == [{1.0}, {1.0}]
