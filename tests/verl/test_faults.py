"""A trainer whose rank fails ends within seconds, with one error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.trainers.faults import FAULTS, Told, inflict
from bench.trainers.running import PHALANX

SOON = 20.0
"""Seconds on a busy machine with two cores. An idle machine takes five."""


def told(name: str, python: Path, data: Path, tmp_path: Path, deadline: float = 0.0) -> Told:
    found = inflict(FAULTS[name], PHALANX, python, data, tmp_path)
    assert found.seconds is not None, f"the trainer did not end:\n{found.text[-4000:]}"
    assert found.seconds < SOON + deadline, (
        f"the trainer took {found.seconds:.1f} s to end:\n{found.text[-4000:]}"
    )
    assert found.left == []
    return found


@pytest.mark.parametrize("fault", ["killed", "main_ppo_killed"])
def test_a_killed_rank_ends_the_trainer_with_its_number_pid_and_signal(
    python: Path, data: Path, tmp_path: Path, fault: str
) -> None:
    found = told(fault, python, data, tmp_path)

    assert found.code == 1
    assert "WorkerDiedError" in found.text
    assert re.search(rf"rank [01] \(host .*, pid {found.harmed}, GPU [01]\) died: SIGKILL", found.text)


def test_an_exception_on_one_rank_ends_the_trainer_with_its_rank_and_traceback(
    python: Path, data: Path, tmp_path: Path
) -> None:
    found = told("raised", python, data, tmp_path)

    assert found.code == 1
    assert re.search(r"rank [01] \(host .*\) raised IndexError: index out of range", found.text)
    assert "train_batch" in found.text


def test_a_stopped_rank_is_reported_at_the_deadline_of_its_call(
    python: Path, data: Path, tmp_path: Path
) -> None:
    found = told("stopped_with_deadline", python, data, tmp_path, deadline=10.0)

    assert found.code == 1
    error = re.search(
        rf"CallTimeout: group 'TrainingWorker', method (\w+), not done after 10 s: "
        rf"rank [01] \(host .*, pid {found.harmed}, GPU [01]\) could not be reached for ",
        found.text,
    )
    assert error
    assert "the process is stopped, as by SIGSTOP" in found.text
    # The signal may come between two steps, at a call in which no rank waits for another.
    assert error[1] != "train_batch" or re.search(r"waiting for that:\n  rank [01] \(", found.text)


def test_an_interrupt_ends_the_trainer_and_all_its_processes(
    python: Path, data: Path, tmp_path: Path
) -> None:
    found = told("interrupted", python, data, tmp_path)

    assert found.code != 0
    assert "KeyboardInterrupt" in found.text
