"""A node is drained under a group that trains, and another told to end; the cluster is one of the test's own."""

from __future__ import annotations

import pytest

from tests.support.scripts import told_by

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_ranks_move_off_nodes_that_go_and_the_losses_are_those_of_a_run_without_a_fault() -> None:
    (found,) = told_by("tests.members.moving_script", timeout=280)
    first, second, third = found["nodes"]

    # The group is told within 2 s of a drain, on a thread of the library's.
    assert found["took"] < 2.0
    assert found["thread"] == "phalanx-background"
    assert found["early"] == 0
    ranks, same_node, host, reason = found["notice"]
    assert (ranks, same_node) == ([2, 3], True)
    assert host
    assert reason
    assert 60 < found["deadline_in"] <= 120
    assert found["asked"] == [[[2, 3]], []]

    # Ranks move off a node that is drained before it goes.
    assert found["moved_in"] == 1
    assert first[:2] == second[:2]
    assert first[2] not in second

    # A node that is told to end is a preemption and no failure.
    assert found["ended"] not in third
    assert second[:2] == third[:2]
    assert len(found["errors"]) <= 1  # none where the loss was known before the next call
    assert any("told to end" in reason for reason in found["reasons"])

    assert found["losses"] == found["expected"]
    assert found["stayed"] == [True, True, False, False]
