"""The policies of a group after a failure, as values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import phalanx as px


@given(st.integers(0, 5), st.floats(1, 100), st.lists(st.floats(0, 1000), max_size=10), st.floats(1000, 1100))
def test_a_policy_never_allows_more_recoveries_in_a_window_than_it_says(
    most: int, window: float, past: list[float], now: float
) -> None:
    within = [at for at in past if now - at < window]

    for policy in (px.RestartPolicy(most, window), px.ReplacePolicy(most, window)):
        assert policy.allows(past, now) == (len(within) < most)
