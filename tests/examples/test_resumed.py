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


def test_a_run_with_too_few_steps_fails_and_goes_on_as_if_it_had_not_been_ended(tmp_path: Path) -> None:
    ended = train(tmp_path, 3, "ended")
    train(tmp_path, 5, "whole")
    train(tmp_path, 5, "ended", "--resume")

    assert 0.0 <= final_reward(ended.stdout) < 0.3  # right by chance
    assert "stayed below 0.9" in ended.stderr
    assert ended.returncode == 1
    assert len(rewards(tmp_path / "whole")) == 5
    assert rewards(tmp_path / "ended") == rewards(tmp_path / "whole")
