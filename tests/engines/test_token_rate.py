"""How many tokens an engine draws per second."""

from __future__ import annotations

import pytest

from phalanx.engines.engine import TokenRate


class Clock:
    """Seconds that pass when they are told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def step(clock: Clock, rate: TokenRate, seconds: float, tokens: int) -> None:
    clock.now += seconds
    rate.add(tokens)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rate(clock: Clock) -> TokenRate:
    return TokenRate(clock)


def test_tokens_per_second_are_those_of_the_time_at_work(clock: Clock, rate: TokenRate) -> None:
    for _ in range(3):
        clock.now += 0.9  # a trainer has the answers
        rate.start()
        step(clock, rate, 0.1, 20)
        step(clock, rate, 0.3, 20)

    assert rate.per_second() == pytest.approx(100)


def test_long_steps_count_whole(clock: Clock, rate: TokenRate) -> None:
    rate.start()
    step(clock, rate, 4.0, 20)
    step(clock, rate, 4.0, 20)

    assert rate.per_second() == pytest.approx(5)


def test_what_was_drawn_ten_seconds_ago_is_forgotten(clock: Clock, rate: TokenRate) -> None:
    rate.start()
    step(clock, rate, 1.0, 1000)
    clock.now += 9.5
    rate.start()
    step(clock, rate, 1.0, 10)
    assert rate.per_second() == pytest.approx(10)

    clock.now += 10.1
    assert rate.per_second() == 0.0
