"""A node is lost under a group that trains; the cluster is one of the test's own, in another process."""

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


def test_its_ranks_are_replaced_elsewhere_and_the_losses_are_those_of_a_run_without_a_fault() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.members.node_script"],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("FOUND "))

    assert found["losses"] == found["expected"]
    assert found["holders"] == [2, 3, 0, 1]  # each on the other node
    assert found["stayed"] == [True, True, False, False]
    assert found["nodes"][2:] == [False, True]  # none on the lost one; the others are where they were
    assert found["epoch"] == 1
