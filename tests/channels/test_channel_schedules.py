"""Seeded schedules keep the count equations, the order of producers and the bound on versions."""

from __future__ import annotations

import pytest

from tests.channels.channel_schedules import Schedule


@pytest.mark.parametrize("block", range(4))
def test_schedules_keep_every_promise(block: int) -> None:
    for seed in range(250 * block, 250 * (block + 1)):
        try:
            Schedule(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.soak
def test_twenty_thousand_schedules_keep_every_promise() -> None:
    for seed in range(1_000, 21_000):
        try:
            Schedule(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
