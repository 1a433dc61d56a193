"""Policies of a group after a failure."""

from __future__ import annotations

import pytest

import phalanx as px


@pytest.mark.parametrize("policy", [px.RestartPolicy(window_s=100.0), px.ReplacePolicy(window_s=100.0)])
def test_a_policy_counts_the_recoveries_within_its_window(
    policy: px.RestartPolicy | px.ReplacePolicy,
) -> None:
    assert policy.recent([0.0, 50.0, 51.0, 150.0], now=150.0) == [51.0, 150.0]
