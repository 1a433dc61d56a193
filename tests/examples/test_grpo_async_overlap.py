"""Generation and training of the asynchronous example go on at once, with stand-ins that wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import phalanx as px
from phalanx.engines import Completion
from tests.examples.loading import loaded

STEPS, WITHIN = 6, 60.0


class Engine(px.Worker):
    """Answers at once, and tells that it was asked."""

    def __init__(self) -> None:
        self.accept_weights("policy", torch.nn.Linear(2, 2))

    @px.register
    def generate(self, prompts: list[list[int]], sampling: Any) -> list[Completion]:
        px.Channel.find("asked").put(len(prompts))
        version = px.weights.current_version("policy") or 0
        return [Completion((1, 2), (-1.0, -1.0), "length", ((version, 2),)) for _ in prompts]


class Trainer(px.Worker):
    """Trains on a batch once an engine was asked for a later one."""

    def __init__(self, rows: int) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.rows, self.asked, self.steps = rows, 0, 0
        self.publish_weights("policy", self.model, step=lambda: self.steps)

    @px.register(px.Dispatch.ROWS, collect="list")
    def update(self, answers: Any, reference: Any) -> SimpleNamespace:
        self.steps += 1
        with torch.no_grad():
            self.model.weight.add_(1.0)
        while self.steps < STEPS and self.asked <= self.steps * self.rows:
            self.asked += px.Channel.find("asked").get(WITHIN)
        return SimpleNamespace(reward=0.0, rows=answers["row"].tolist())


class Reference(px.Worker):
    @px.register(px.Dispatch.ROWS)
    def log_probs(self, answers: Any) -> Any:
        return answers["log_probs"]


class Judge(px.Worker):
    @px.register(px.Dispatch.ROWS)
    def score(self, answers: Any) -> Any:
        return torch.zeros(len(answers["row"]))


@pytest.fixture
def example(ray_cluster: None) -> Iterator[ModuleType]:
    with loaded("grpo_async", "ray") as module:
        yield module


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_while_a_batch_is_trained_on_the_next_one_is_generated(example: ModuleType) -> None:
    settings = example.Settings(questions=4, together=2, group_size=2, digits=2, steps=STEPS, max_lag=1)
    staleness = px.StalenessManager(1, rows_per_version=settings.rows)
    roles = px.colocate({"actor": Trainer.bind(settings.rows), "reference": Reference})
    with px.ResourcePool([3], use_gpu=False) as pool, px.Channel(name="asked"):
        groups = example.Groups(
            rollout=px.WorkerGroup(pool[0:1], Engine, name="rollout"),
            judge=px.WorkerGroup(pool[1:2], Judge, name="judge"),
            trainer=px.WorkerGroup(pool[2:3], roles, name="trainer"),
        )
        assert len(list(example.grpo(groups, settings, staleness))) == STEPS

    assert staleness.stats.rows.trained == STEPS * settings.rows
    assert max(staleness.stats.lags) == 1
