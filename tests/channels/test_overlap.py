"""Overlap of generation and training that leases allow, in simulated steps."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.channels.staleness_state import StalenessState

ROWS = 8
"""Rows of one version. A lease has half of them."""
VERSIONS = 40


def run(max_lag: int, generates: int, trains: int) -> tuple[int, StalenessState]:
    """Return the steps of all versions if an engine needs ``generates`` for one, and a trainer ``trains``."""
    staleness = StalenessState(max_lag, ROWS)
    leases: list[Any] = []
    now = accepted = asked = 0
    generated = trained = -1
    while staleness.version < VERSIONS:
        if now == trained:
            staleness.advance(staleness.version + 1)
        if now == generated:
            version = leases.pop()
            accepted += len(staleness.accept(("engine", asked), [version] * (ROWS // 2)))
        if accepted >= ROWS and now >= trained:
            accepted, trained = accepted - ROWS, now + trains
        if now >= generated and not leases and not staleness.stats().waiting:
            asked += 1
            staleness.lease(("engine", asked), leases.append, ROWS // 2)
        if leases and now >= generated:
            generated = now + generates // 2
        now += 1
    return now - 1, staleness


@pytest.mark.parametrize(
    ("max_lag", "generates", "trains"), [(0, 10, 10), (1, 10, 10), (4, 10, 10), (1, 10, 4), (1, 4, 10)]
)
def test_generation_and_training_overlap_if_lag_is_allowed_and_the_slower_never_waits(
    max_lag: int, generates: int, trains: int
) -> None:
    steps, staleness = run(max_lag, generates, trains)
    together = VERSIONS * max(generates, trains) + min(generates, trains)

    assert steps <= together if max_lag else steps == VERSIONS * (generates + trains)
    assert staleness.stats().rows.dropped == 0
    assert max(staleness.lags) == min(max_lag, 1)  # the lag that overlap needs, not the allowed lag
