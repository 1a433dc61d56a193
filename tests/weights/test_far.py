"""Weights between nodes: two logical ones, of a cluster of the test's own, in another process."""

from __future__ import annotations

import pytest

from tests.support.scripts import told_by

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

MB = 2**20
BIAS = 7 * 4  # bytes


def test_sources_on_two_nodes_reach_targets_on_both_by_gloo_and_nothing_stays_in_the_object_store() -> None:
    (found,) = told_by("tests.weights.far_script", timeout=480)

    assert found["nodes"] == [2, 2]
    assert all(sync["right"] and sync["sources"] == 4 for sync in found["syncs"])
    assert {tuple(sync["movers"]) for sync in found["syncs"]} == {("gloo",)}
    assert found["syncs"][0]["nbytes"] == 8 * MB + 2 * BIAS  # each target its half, and the bias
    assert found["held"] < MB
    assert found["grown"] < MB
