"""The asynchronous GRPO example: in this process, and as a script."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import phalanx as px
from phalanx.testing import faults
from tests.examples.loading import FOLDER, loaded
from tests.examples.test_examples import final_reward
from tests.support.fault_workers import within
from tests.support.scripts import run

SCRIPT, WITHIN = FOLDER / "grpo_async.py", 60.0


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with loaded("grpo_async", "inline") as module:
        yield module


@contextmanager
def begun(example: ModuleType, **changes: object) -> Generator[tuple[Any, Any, px.StalenessManager]]:
    """Yield groups of one rank each, small settings, and a staleness manager for them."""
    small = {"digits": 4, "questions": 4, "together": 4, "group_size": 4, "steps": 4}
    settings = example.Settings(**{**small, **changes})
    staleness = px.StalenessManager(settings.max_lag, rows_per_version=settings.rows)
    with example.started(settings, 1, 1, "cpu") as groups:
        yield groups, settings, staleness


def test_rewards_without_lag_are_those_of_alternating_generation_and_training(example: ModuleType) -> None:
    with begun(example, max_lag=0) as (groups, settings, _):
        in_turn = list(example.in_turn(groups, settings))
    with begun(example, max_lag=0) as (groups, settings, staleness):
        assert list(example.grpo(groups, settings, staleness)) == in_turn

    assert staleness.stats.lags == {0: 4 * 16}


def test_answers_stay_within_the_allowed_lag_and_none_is_lost(example: ModuleType) -> None:
    with begun(example, together=2, steps=6) as (groups, settings, staleness):
        assert len(list(example.grpo(groups, settings, staleness))) == 6

    rows = staleness.stats.rows
    assert rows.trained == 6 * 16
    assert (rows.submitted - rows.dropped, rows.running, rows.ready) == (6 * 16, 0, 0)
    assert set(staleness.stats.lags) <= {0, 1}


def test_questions_with_stale_answers_are_asked_again(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, late = example.answered, []

    def slow_at_first(groups: object, settings: object, asked: dict[str, torch.Tensor]) -> object:
        rows = answered(groups, settings, asked)
        if not late:
            late.append(rows)
            assert within(WITHIN, lambda: staleness.version >= 3)
        return rows

    monkeypatch.setattr(example, "answered", slow_at_first)
    with begun(example, together=2, steps=6) as (groups, settings, staleness):
        assert len(list(example.grpo(groups, settings, staleness))) == 6

    assert staleness.stats.dropped == {"stale": 8}
    assert staleness.stats.rows.trained == 6 * 16


def test_the_next_batch_is_generated_during_training(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, generated, steps = example.answered, list[int](), list[None]()

    def noted(groups: object, settings: object, asked: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Begin to generate a batch once the step on the batch before has begun."""
        assert within(WITHIN, lambda: len(steps) >= int(asked["row"][0]) // 16)
        rows = answered(groups, settings, asked)
        generated.append(len(rows["row"]))
        return rows

    monkeypatch.setattr(example, "answered", noted)
    with begun(example, together=2) as (groups, settings, staleness):
        update = groups.trainer.actor.update

        def update_late(batch: object, reference: object) -> object:
            """Train once there are answers of the next batch."""
            steps.append(None)
            assert within(WITHIN, lambda: len(steps) == 4 or sum(generated) > len(steps) * 16)
            return update(batch, reference)

        groups.trainer.actor.__dict__["update"] = update_late
        assert len(list(example.grpo(groups, settings, staleness))) == 4

    assert staleness.stats.rows.trained == 4 * 16
    assert max(staleness.stats.lags) == 1


def test_a_resumed_run_trains_on_every_question_once(example: ModuleType, tmp_path: Path) -> None:
    trained: list[int] = []

    def train(count: int, *, resume: bool = False) -> tuple[list[float], px.StalenessManager]:
        saving = example.Saving(str(tmp_path / "run"), resume, every=3)
        with begun(example, together=2, steps=6) as (groups, settings, staleness):
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
    with begun(example) as (groups, settings, staleness):
        steps = example.grpo(groups, settings, staleness)
        next(steps)
        faults.raises(groups.rollout, 0, ArithmeticError("an engine fails"), method="generate")
        with pytest.raises(ArithmeticError, match="an engine fails"):
            list(steps)


def test_answers_have_the_log_probabilities_and_weight_version_of_their_tokens(example: ModuleType) -> None:
    with begun(example) as (groups, settings, _):
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
