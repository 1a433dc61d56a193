"""The parts of the GRPO example that are plain functions."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import phalanx as px
from phalanx.engines import Completion
from tests.examples.loading import loaded


@pytest.fixture(scope="module")
def grpo() -> Iterator[ModuleType]:
    with loaded("grpo", "inline") as module:
        yield module


def test_advantages_are_relative_to_the_answers_of_the_same_question(grpo: ModuleType) -> None:
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.5])

    advantages = grpo.group_advantages(rewards, group_size=2)

    assert advantages[0] == -advantages[1] < 0
    assert advantages[2:].tolist() == [0.0, 0.0]


def test_a_question_is_digits_between_two_marks_and_its_reward_the_fraction_copied(grpo: ModuleType) -> None:
    questions = grpo.ask(5, 4, torch.Generator().manual_seed(0))
    assert questions.shape == (5, 6)
    assert questions[:, 0].eq(grpo.BEGIN).all() and questions[:, -1].eq(grpo.END).all()
    assert questions[:, 1:-1].lt(10).all()

    questions = torch.tensor([[grpo.BEGIN, 3, 1, 4, 1, grpo.END]] * 3)
    answers = (3, 1, 4, 1), (3, 1, 4, 5), (0, 0, 0, 0)
    completions = [Completion(answer, (-1.0,) * 4, "length", ((1, 4),)) for answer in answers]
    assert grpo.Reward().score(questions, completions).tolist() == [1.0, 0.75, 0.0]


def test_log_probabilities_of_an_answer_belong_to_its_own_tokens(grpo: ModuleType) -> None:
    torch.manual_seed(0)
    model, tokens = grpo.small_llama(), torch.randint(0, 10, (2, 10))

    log_probs = grpo.of_answer(grpo.answer_distribution(model, tokens, digits=4), tokens)

    whole = model(tokens).logits.log_softmax(dim=-1)
    expected = torch.stack([whole[:, p - 1].gather(1, tokens[:, p, None])[:, 0] for p in range(6, 10)], dim=1)
    assert torch.allclose(log_probs, expected, atol=1e-5)
    assert sum(parameter.numel() for parameter in model.parameters()) == 113_984, "as small as it says"


def steps_of(grpo: ModuleType, patch: pytest.MonkeyPatch, *outcomes: float | Exception) -> Iterator[float]:
    """Return the loop that recovers, on steps that end with ``outcomes`` in turn."""
    patch.setattr(grpo, "train_on", Mock(side_effect=outcomes))
    for verb in ("snapshot", "restore"):
        patch.setattr(grpo.px, verb, lambda *_: None)
    groups = SimpleNamespace(policy=None, rollout=None)
    return grpo.grpo_with_losses(groups, None, grpo.Settings(steps=2), torch.Generator())


def test_a_step_that_lost_a_rank_is_repeated_and_an_error_of_a_worker_ends_the_run(
    grpo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    died = px.WorkerDiedError("rank 1 died", failures=(px.errors.RankReport(1, "died"),))
    raised = px.errors.RankReport(1, "raised", type_name="ValueError")

    rewards = list(steps_of(grpo, monkeypatch, 0.5, died, px.GroupBroken("broken", cause=died), 0.75))

    assert rewards == [0.5, 0.75]
    assert "since rank 1 died" in capsys.readouterr().err
    with pytest.raises(px.RemoteCallError):
        list(steps_of(grpo, monkeypatch, 0.5, px.RemoteCallError("rank 1 raised", failures=(raised,))))
