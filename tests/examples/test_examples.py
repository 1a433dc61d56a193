"""The tutorial and the GRPO example, run as users run them: as scripts in their own processes."""

from __future__ import annotations

import pickle
import re
import subprocess
from pathlib import Path

import pytest

from phalanx.checkpoint.steps import read_step
from tests.support.scripts import run, start

ROOT = Path(__file__).parents[2]
TUTORIAL = sorted((ROOT / "examples" / "tutorial").glob("*.py"))
GRPO = ROOT / "examples" / "grpo.py"


def final_reward(output: str) -> float:
    """Return the number in the last line of the GRPO example."""
    last = re.fullmatch(r"final mean reward: (\d\.\d\d)", output.splitlines()[-1])
    assert last is not None, output
    return float(last[1])


@pytest.mark.parametrize(
    "chapter",
    [
        pytest.param(path, marks=[pytest.mark.slow] if "megatron" in path.stem else [], id=path.stem)
        for path in TUTORIAL
    ],
)
def test_a_chapter_of_the_tutorial_runs_in_one_process(chapter: Path, tmp_path: Path) -> None:
    run(chapter, backend="inline", folder=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_grpo_learns_to_copy_on_two_ranks_and_saves_curve_and_report(tmp_path: Path) -> None:
    few = ("--device", "cpu", "--seed", "4", "--steps", "250")
    output = run(GRPO, *few, backend="ray", folder=tmp_path)

    assert final_reward(output) > 0.9
    assert (tmp_path / "out" / "grpo_reward.png").read_bytes().startswith(b"\x89PNG")
    assert "out/grpo_report.html" in output
    report = (tmp_path / "out" / "grpo_report.html").read_text()
    assert all(
        name in report for name in ("mean reward of each step", "policy.actor.update", "rollout.generate")
    )


def rewards_of(path: Path) -> list[float]:
    """Return the rewards of all steps that the last saved step of a run has."""
    _, values, _ = pickle.loads(read_step(str(path)).read("driver/state.pickle"))
    return pickle.loads(values["rewards"])


def train(folder: Path, steps: int, path: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the example in one process, which saves every second step and the last one."""
    options = {"--ranks": "1", "--device": "cpu", "--steps": str(steps), "--save": path, "--save-every": "2"}
    words = [word for option in options.items() for word in option]
    return start(GRPO, *words, *more, backend="inline", folder=folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_with_too_few_steps_fails_and_resumes_with_the_rewards_of_an_uninterrupted_run(
    tmp_path: Path,
) -> None:
    ended = train(tmp_path, 3, "ended")
    train(tmp_path, 5, "whole")
    train(tmp_path, 5, "ended", "--resume")

    assert 0.0 <= final_reward(ended.stdout) < 0.3  # right by chance
    assert "stayed below 0.9" in ended.stderr
    assert ended.returncode == 1
    assert len(rewards_of(tmp_path / "whole")) == 5
    assert rewards_of(tmp_path / "ended") == rewards_of(tmp_path / "whole")
