"""A node is lost under a group; the cluster is one of the test's own, in another process."""

from __future__ import annotations

import pytest

from tests.support.scripts import told_by

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_a_lost_node_is_one_error_and_a_restart_moves_the_lost_ranks_or_says_that_there_is_no_room() -> None:
    (found,) = told_by("tests.group.node_loss_script", timeout=220)

    assert found["took"] < 20.0
    assert (found["kind"], found["causes"]) == ("WorkerDiedError", [2, 3])
    assert found["lost"][:8] in found["text"]
    assert "health_check_period_ms" in found["hint"], "how the detection is tuned"
    assert (found["stayed"], found["moved"]) == (True, True)
    assert found["loaded"] == [7, 7, 7, 7]
    kind, text, state = found["no_room"]
    assert (kind, state) == ("PlacementError", "broken")
    assert "slots ever/now" in text
