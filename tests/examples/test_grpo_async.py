"""The asynchronous GRPO example: in this process, as a script, and on stand-ins that wait for each other."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import phalanx as px
from phalanx.engines import Completion
from phalanx.testing import faults
from tests.examples.loading import FOLDER, loaded
from tests.examples.test_examples import final_reward
from tests.support.scripts import run

SCRIPT = FOLDER / "grpo_async.py"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with loaded("grpo_async", "inline") as module:
        yield module


def settings_of(example: ModuleType, **changes: object) -> object:
    small = {"digits": 4, "questions": 4, "together": 4, "group_size": 4, "steps": 4}
    return example.Settings(**{**small, **changes})


def staleness_of(settings: object) -> px.StalenessManager:
    return px.StalenessManager(settings.max_lag, rows_per_version=settings.rows)  # type: ignore[attr-defined]


def test_rewards_without_lag_are_those_of_alternating_generation_and_training(example: ModuleType) -> None:
    settings = settings_of(example, max_lag=0)
    with example.started(settings, 1, 1, "cpu") as groups:
        in_turn = list(example.in_turn(groups, settings))
    with example.started(settings, 1, 1, "cpu") as groups:
        staleness = staleness_of(settings)

        assert list(example.grpo(groups, settings, staleness)) == in_turn

    assert staleness.stats.lags == {0: 4 * 16}


def test_answers_stay_within_the_allowed_lag_and_none_is_lost(example: ModuleType) -> None:
    settings = settings_of(example, max_lag=1, together=2, steps=6)
    staleness = staleness_of(settings)
    with example.started(settings, 1, 1, "cpu") as groups:
        assert len(list(example.grpo(groups, settings, staleness))) == 6

    rows = staleness.stats.rows
    assert rows.trained == 6 * 16
    assert (rows.submitted - rows.dropped, rows.running, rows.ready) == (6 * 16, 0, 0)
    assert set(staleness.stats.lags) <= {0, 1}


def test_questions_with_stale_answers_are_asked_again(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(example, max_lag=1, together=2, steps=6)
    staleness = staleness_of(settings)
    answered, late = example.answered, []

    def slow_at_first(groups: object, settings: object, asked: dict[str, torch.Tensor]) -> object:
        rows = answered(groups, settings, asked)
        if not late:
            late.append(rows)
            while staleness.version < 3:
                time.sleep(0.001)
        return rows

    monkeypatch.setattr(example, "answered", slow_at_first)
    with example.started(settings, 1, 1, "cpu") as groups:
        assert len(list(example.grpo(groups, settings, staleness))) == 6

    assert staleness.stats.dropped == {"stale": 8}
    assert staleness.stats.rows.trained == 6 * 16


def test_a_resumed_run_trains_on_every_question_once(example: ModuleType, tmp_path: Path) -> None:
    trained: list[int] = []

    def train(count: int, *, resume: bool = False) -> tuple[list[float], px.StalenessManager]:
        settings = settings_of(example, max_lag=1, together=2, steps=6)
        staleness = staleness_of(settings)
        saving = example.Saving(str(tmp_path / "run"), resume, every=3)
        with example.started(settings, 1, 1, "cpu") as groups:
            update = groups.trainer.actor.update

            def noted(batch: object, reference: object) -> list[object]:
                done = update(batch, reference)
                trained.extend(row for one in done for row in one.rows)
                return done

            groups.trainer.actor.__dict__["update"] = noted
            steps = example.grpo(groups, settings, staleness, saving)
            rewards = [next(steps) for _ in range(count)]
            steps.close()
            return rewards, staleness

    first, before = train(3)
    rewards, staleness = train(6, resume=True)

    assert before.stats.rows.submitted > 3 * 16  # generation was ahead
    assert rewards[:3] == first
    assert sorted(trained) == list(range(6 * 16))
    assert staleness.stats.rows.trained == 6 * 16
    assert set(staleness.stats.lags) <= {0, 1}
    with pytest.raises(SystemExit, match="--resume goes on with it"):
        train(6)


def test_a_failure_during_generation_ends_the_training_with_its_error(example: ModuleType) -> None:
    settings = settings_of(example)
    with example.started(settings, 1, 1, "cpu") as groups:
        steps = example.grpo(groups, settings, staleness_of(settings))
        next(steps)
        faults.raises(groups.rollout, 0, ArithmeticError("an engine fails"), method="generate")
        with pytest.raises(ArithmeticError, match="an engine fails"):
            list(steps)


def test_answers_have_the_log_probabilities_and_weight_version_of_their_tokens(example: ModuleType) -> None:
    settings = settings_of(example)
    with example.started(settings, 1, 1, "cpu") as groups:
        with px.WeightSync(groups.trainer.actor, groups.rollout, "policy") as sync:
            sync()
        rows = example.answered(groups, settings, next(example.asked(settings)))
        now = groups.trainer.reference.log_probs(rows)

    torch.testing.assert_close(rows["log_probs"], now, atol=1e-5, rtol=1e-4)
    assert rows["version"].tolist() == [1] * 16


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_script_trains_on_all_answers_if_syncs_wait_for_running_answers(tmp_path: Path) -> None:
    few = ("--device", "cpu", "--steps", "3", "--target", "0", "--at-sync", "wait")

    assert re.search(r"trained +768", run(SCRIPT, *few, backend="ray", folder=tmp_path))


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_script_learns_to_copy_and_writes_a_report(tmp_path: Path) -> None:
    output = run(SCRIPT, "--device", "cpu", "--seed", "1", backend="ray", folder=tmp_path)

    assert final_reward(output) >= 0.95
    assert (tmp_path / "out" / "grpo_async_report.html").stat().st_size > 10_000


STEPS, WITHIN = 6, 60.0


class Engine(px.Worker):
    """An engine that answers at once and reports each request."""

    def __init__(self) -> None:
        self.accept_weights("policy", torch.nn.Linear(2, 2))

    @px.register
    def generate(self, prompts: list[list[int]], sampling: Any) -> list[Completion]:
        px.Channel.find("asked").put(len(prompts))
        version = px.weights.current_version("policy") or 0
        return [Completion((1, 2), (-1.0, -1.0), "length", ((version, 2),)) for _ in prompts]


class Trainer(px.Worker):
    """A trainer that ends a step once the engine was asked for the next batch."""

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
def on_ray(ray_cluster: None) -> Iterator[ModuleType]:
    with loaded("grpo_async", "ray") as module:
        yield module


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_next_batch_is_generated_during_training(on_ray: ModuleType) -> None:
    settings = on_ray.Settings(questions=4, together=2, group_size=2, digits=2, steps=STEPS, max_lag=1)
    staleness = px.StalenessManager(1, rows_per_version=settings.rows)
    roles = px.colocate({"actor": Trainer.bind(settings.rows), "reference": Reference})
    with px.ResourcePool([3], use_gpu=False) as pool, px.Channel(name="asked"):
        groups = on_ray.Groups(
            rollout=px.WorkerGroup(pool[0:1], Engine, name="rollout"),
            judge=px.WorkerGroup(pool[1:2], Judge, name="judge"),
            trainer=px.WorkerGroup(pool[2:3], roles, name="trainer"),
        )
        assert len(list(on_ray.grpo(groups, settings, staleness))) == STEPS

    assert staleness.stats.rows.trained == STEPS * settings.rows
    assert max(staleness.stats.lags) == 1
