"""A node is drained under a group, as before a preemption; the cluster is one of the test's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the script saw."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("drain_script.py"))],
        capture_output=True,
        text=True,
        timeout=220,
        env=dict(os.environ),
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("FOUND "))


def test_the_group_is_told_within_2_s_on_a_thread_of_the_librarys(found: dict[str, Any]) -> None:
    assert found["told"]
    assert found["took"] < 2.0
    assert found["thread"] == "phalanx-watchman"
    assert found["early"] == 0


def test_a_notice_names_ranks_node_and_deadline(found: dict[str, Any]) -> None:
    ranks, same_node, host, reason = found["notice"]

    assert (ranks, same_node) == ([2, 3], True)
    assert host
    assert reason
    assert 30 < found["deadline_in"] <= 60
    assert found["asked"] == [[2, 3], 0]


def test_the_ranks_work_on_until_their_node_goes(found: dict[str, Any]) -> None:
    assert found["steps"] == [[1] * 4, [2] * 4]


def test_what_was_announced_is_no_failure_and_the_group_comes_back_elsewhere(found: dict[str, Any]) -> None:
    assert found["lost"] == "WorkerDiedError"
    assert found["after"] == [1] * 4
    assert found["moved"]
