"""The GRPO example goes on from what it saved, number by number."""

from __future__ import annotations

import pickle
import subprocess
from pathlib import Path

import pytest

from phalanx.checkpoint.steps import read_step
from tests.examples.test_examples import GRPO, final_reward, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def rewards(path: Path) -> list[float]:
    """Of all steps, as the last one of a run has them."""
    _, values, _ = pickle.loads(read_step(str(path)).read("driver/state.pickle"))
    return pickle.loads(values["rewards"])


def train(folder: Path, steps: int, path: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the example in one process, which saves every second step and the last one."""
    options = {"--ranks": "1", "--device": "cpu", "--steps": str(steps), "--save": path, "--save-every": "2"}
    words = [word for option in options.items() for word in option]
    return start(GRPO, *words, *more, backend="inline", folder=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def ended(folder: Path) -> subprocess.CompletedProcess[str]:
    """A run of three steps."""
    return train(folder, 3, "ended")


def test_a_run_with_too_few_steps_ends_with_its_reward_and_a_failing_exit_status(
    ended: subprocess.CompletedProcess[str],
) -> None:
    assert 0.0 <= final_reward(ended.stdout) < 0.3  # right by chance
    assert "stayed below 0.9" in ended.stderr
    assert ended.returncode == 1


def test_a_run_that_was_ended_goes_on_as_if_it_had_not_been(
    folder: Path, ended: subprocess.CompletedProcess[str]
) -> None:
    train(folder, 5, "whole")
    train(folder, 5, "ended", "--resume")

    assert len(rewards(folder / "whole")) == 5
    assert rewards(folder / "ended") == rewards(folder / "whole")
