"""A node is lost under a group; the cluster is one of the test's own, in another process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scripts import told_by

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the script saw."""
    (found,) = told_by("tests.group.node_loss_script", timeout=220)
    return found


def test_the_loss_of_a_node_is_one_error_that_names_node_and_ranks_within_20_s(found: dict[str, Any]) -> None:
    assert found["took"] < 20.0
    assert found["kind"] == "WorkerDiedError"
    assert found["causes"] == [2, 3]
    assert found["lost"][:8] in found["text"]


def test_the_error_says_how_the_detection_is_tuned(found: dict[str, Any]) -> None:
    assert "health_check_period_ms" in found["hint"]


def test_a_restart_moves_the_lost_ranks_only_and_replays(found: dict[str, Any]) -> None:
    assert found["stayed"]
    assert found["moved"]
    assert found["loaded"] == [7, 7, 7, 7]


def test_a_restart_without_room_is_a_placement_error_with_the_table(found: dict[str, Any]) -> None:
    kind, text, state = found["no_room"]

    assert kind == "PlacementError"
    assert "slots ever/now" in text
    assert state == "broken"
