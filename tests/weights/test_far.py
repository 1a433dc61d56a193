"""Weights between nodes: two logical ones, of a cluster of the test's own, in another process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scripts import told_by

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

MB = 2**20
BIAS = 7 * 4  # bytes


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the script saw."""
    (told,) = told_by("tests.weights.far_script", timeout=480)
    return told


def test_sources_on_two_nodes_reach_targets_on_both_by_gloo(found: dict[str, Any]) -> None:
    assert found["nodes"] == [2, 2]
    assert all(sync["right"] and sync["sources"] == 4 for sync in found["syncs"])
    assert {tuple(sync["movers"]) for sync in found["syncs"]} == {("gloo",)}
    assert found["syncs"][0]["nbytes"] == 8 * MB + 2 * BIAS  # each target its half, and the bias


def test_nothing_of_many_syncs_stays_in_the_object_store(found: dict[str, Any]) -> None:
    assert found["held"] < MB
    assert found["grown"] < MB
