"""Tokens that an engine samples per second."""

from __future__ import annotations

import pytest

from phalanx.engines.engine import TokenRate
from phalanx.testing.clock import FakeClock

#: Periods of work: idle seconds before each, then seconds and tokens of its steps.
Work = list[tuple[float, list[tuple[float, int]]]]


@pytest.mark.parametrize(
    ("work", "rest", "rate"),
    [
        ([(0.9, [(0.1, 20), (0.3, 20)])] * 3, 0.0, 100),  # a trainer works between two periods
        ([(0.0, [(4.0, 20), (4.0, 20)])], 0.0, 5),
        ([(0.0, [(1.0, 1000)]), (9.5, [(1.0, 10)])], 0.0, 10),
        ([(0.0, [(1.0, 1000)])], 10.1, 0),
    ],
)
def test_the_token_rate_counts_only_time_at_work_in_the_last_ten_seconds(
    work: Work, rest: float, rate: float
) -> None:
    clock = FakeClock(100.0)
    counted = TokenRate(clock.now)
    for idle, steps in work:
        clock.advance(idle)
        counted.start()
        for seconds, tokens in steps:
            clock.advance(seconds)
            counted.add(tokens)
    clock.advance(rest)

    assert counted.per_second() == pytest.approx(rate)
