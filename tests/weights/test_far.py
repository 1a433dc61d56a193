"""Weights between nodes: two logical ones, of a cluster of the test's own, in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

MB = 2**20
BIAS = 7 * 4  # bytes


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the script saw."""
    script = Path(__file__).with_name("far_script.py")
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=480, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert len(lines) == 2, done.stderr[-4000:]
    return {name: seen for line in lines for name, seen in json.loads(line.removeprefix("FOUND ")).items()}


def test_all_that_goes_to_another_node_goes_by_gloo(found: dict[str, Any]) -> None:
    far = found["far"]
    assert far["nodes"] == [1, 1, 2]
    assert all(sync["right"] for sync in far["syncs"])
    assert {tuple(sync["movers"]) for sync in far["syncs"]} == {("gloo",)}
    assert far["syncs"][0]["nbytes"] == 8 * MB + 2 * BIAS  # each target its half, and the bias


def test_nothing_of_many_syncs_stays_in_the_object_store(found: dict[str, Any]) -> None:
    assert found["far"]["held"] < MB
    assert found["far"]["grown"] < MB


def test_nothing_of_a_sync_lies_in_shared_memory_under_a_name(found: dict[str, Any]) -> None:
    assert found["far"]["shm"] == 0


def test_sources_on_two_nodes_reach_targets_on_both(found: dict[str, Any]) -> None:
    mixed = found["mixed"]
    assert mixed["nodes"] == [2, 2, 2]
    assert all(sync["right"] and sync["sources"] == 4 for sync in mixed["syncs"])
    assert mixed["syncs"][0]["movers"] == ["gloo"]


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_rank_that_is_killed_in_the_middle_is_an_error_and_a_restart_heals(
    found: dict[str, Any], side: str
) -> None:
    killed = found["mixed"][f"{side} killed"]
    assert killed["kind"] == "WorkerDiedError"
    assert killed["took"] < 5.0
    assert killed["right"] == [True, True]
