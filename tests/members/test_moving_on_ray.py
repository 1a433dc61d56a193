"""A node is drained under a group that trains, and another told to end; the cluster is one of the test's own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scripts import told_by

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the script saw."""
    (found,) = told_by("tests.members.moving_script", timeout=280)
    return found


def test_the_group_is_told_within_2_s_of_a_drain_on_a_thread_of_the_librarys(found: dict[str, Any]) -> None:
    assert found["took"] < 2.0
    assert found["thread"] == "phalanx-background"
    assert found["early"] == 0


def test_a_notice_names_ranks_node_and_deadline(found: dict[str, Any]) -> None:
    ranks, same_node, host, reason = found["notice"]

    assert (ranks, same_node) == ([2, 3], True)
    assert host
    assert reason
    assert 60 < found["deadline_in"] <= 120
    assert found["asked"] == [[[2, 3]], []]


def test_ranks_move_off_a_node_that_is_drained_before_it_goes(found: dict[str, Any]) -> None:
    first, second, _ = found["nodes"]

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
