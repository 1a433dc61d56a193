"""A node is drained under a group that trains, and another told to end; the cluster is one of the test's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the script saw."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.members.moving_script"],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("FOUND "))


def test_ranks_move_off_a_node_that_is_drained_before_it_goes(found: dict[str, Any]) -> None:
    first, second, _ = found["nodes"]

    assert found["took"] < 2.0
    assert found["moved_in"] == 1
    assert first[:2] == second[:2]
    assert first[2] not in second


def test_a_node_that_is_told_to_end_is_a_preemption_and_no_failure(found: dict[str, Any]) -> None:
    _, second, third = found["nodes"]

    assert found["ended"] not in third
    assert second[:2] == third[:2]
    assert len(found["errors"]) <= 1  # none where the loss was known before the next call
    assert any("told to end" in reason for reason in found["reasons"])


def test_the_losses_are_those_of_a_run_without_a_fault_and_the_others_keep_their_processes(
    found: dict[str, Any],
) -> None:
    assert found["losses"] == found["expected"]
    assert found["stayed"] == [True, True, False, False]
