"""Weights between two logical nodes of a cluster in another process."""

from __future__ import annotations

import pytest

from tests.support.scripts import told_by

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

MB = 2**20
BIAS = 7 * 4  # bytes


def test_gloo_syncs_two_nodes_and_leaves_nothing_in_the_object_store() -> None:
    (found,) = told_by("tests.weights.far_script", timeout=480)

    assert found["nodes"] == [2, 2]
    assert all(sync["right"] and sync["sources"] == 4 for sync in found["syncs"])
    assert {tuple(sync["movers"]) for sync in found["syncs"]} == {("gloo",)}
    assert found["syncs"][0]["nbytes"] == 8 * MB + 2 * BIAS  # half of the matrix and the bias for each target
    assert found["held"] < MB
    assert found["grown"] < MB
