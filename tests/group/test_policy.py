"""Policies of a group after a failure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import phalanx as px


@given(st.integers(0, 5), st.floats(1, 100), st.lists(st.floats(0, 1000), max_size=10), st.floats(1000, 1100))
def test_a_policy_allows_at_most_its_number_of_recoveries_in_a_window(
    most: int, window: float, past: list[float], now: float
) -> None:
    within = [at for at in past if now - at < window]

    for policy in (px.RestartPolicy(most, window), px.ReplacePolicy(most, window)):
        assert policy.allows(past, now) == (len(within) < most)
