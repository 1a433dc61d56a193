"""Weights between two logical nodes of a cluster in another process."""

from __future__ import annotations

import pytest

from tests.support.scripts import told_by

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def test_a_sync_sends_weights_to_its_own_and_another_node_by_the_transport_of_each() -> None:
    (found,) = told_by("tests.weights.far_script", timeout=480)

    assert found["equal"]
    assert found["hops"] == [["other node", "gloo"], ["same node", "shared memory"]]
