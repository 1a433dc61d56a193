"""A node is drained under a group, as before a preemption; the cluster is one of the test's own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scripts import told_by

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the script saw."""
    (found,) = told_by("tests.group.drain_script", timeout=220)
    return found


def test_the_group_is_told_within_2_s_on_a_thread_of_the_librarys(found: dict[str, Any]) -> None:
    assert found["told"]
    assert found["took"] < 2.0
    assert found["thread"] == "phalanx-background"
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
