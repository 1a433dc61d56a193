"""The GRPO example goes on from what it saved, number by number."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from phalanx.saving.steps import read_step
from tests.examples.test_examples import GRPO, start


def rewards(path: Path) -> list[float]:
    """Of all steps, as the last one of a run has them."""
    _, values, _ = pickle.loads(read_step(str(path)).read("driver/state.pickle"))
    return pickle.loads(values["rewards"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_was_ended_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    def train(steps: int, path: str, *more: str) -> str:
        options = [
            "--ranks",
            "1",
            "--device",
            "cpu",
            "--steps",
            str(steps),
            "--save",
            path,
            "--save-every",
            "2",
        ]
        return start(GRPO, *options, *more, backend="inline", folder=tmp_path).stderr

    train(5, "whole")
    train(3, "ended")
    train(5, "ended", "--resume")

    assert len(rewards(tmp_path / "whole")) == 5
    assert rewards(tmp_path / "ended") == rewards(tmp_path / "whole")
