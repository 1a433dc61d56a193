"""How much of the time of generation and training the leases let fall together, on a clock of steps."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from phalanx.channels.staleness_state import StalenessState

ROWS = 8
"""Of one version; a lease has half of them."""


class Clock:
    """Steps of a machine with as many hands as there is to do: what is to be done when."""

    def __init__(self) -> None:
        self.now = 0
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, steps: int, do: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (self.now + steps, self._count, do))

    def run(self) -> None:
        while self._due:
            self.now, _, do = heapq.heappop(self._due)
            do()


class Pipeline:
    """An engine, which takes ``generates`` steps for the rows of a version, and a trainer, which takes ``trains``."""

    def __init__(self, max_lag: int, generates: int, trains: int, versions: int) -> None:
        self.clock = Clock()
        self.staleness = StalenessState(max_lag, ROWS)
        self._generates, self._trains, self._versions = generates, trains, versions
        self._asked = 0
        self._accepted = 0
        self._training = self._generating = False

    def run(self) -> int:
        """The steps that all versions take."""
        self._ask()
        self.clock.run()
        return self.clock.now

    def _ask(self) -> None:
        if self._asked < 2 * self._versions:
            self._asked += 1
            self.staleness.lease(("engine", self._asked), self._leased, ROWS // 2)

    def _leased(self, answer: tuple[Any, ...]) -> None:
        _, lease, version = answer
        self.clock.after(self._generates // 2, partial(self._generated, lease, version))

    def _generated(self, lease: int, version: int) -> None:
        self._accepted += len(self.staleness.accept(lease, [version] * (ROWS // 2)))
        self.staleness.end(lease, "not accepted")
        self._train()
        self._ask()

    def _train(self) -> None:
        if self._accepted >= ROWS and not self._training:
            self._accepted -= ROWS
            self._training = True
            self.clock.after(self._trains, self._trained)

    def _trained(self) -> None:
        self._training = False
        self.staleness.advance(self.staleness.version + 1)
        self._train()


def test_without_lag_they_take_turns() -> None:
    pipeline = Pipeline(max_lag=0, generates=10, trains=10, versions=40)

    assert pipeline.run() == 40 * 20
    assert pipeline.staleness.lags == {0: 40 * ROWS}


@pytest.mark.parametrize("max_lag", [1, 2, 4])
def test_with_lag_they_fall_together(max_lag: int) -> None:
    in_turn = Pipeline(0, generates=10, trains=10, versions=40).run()
    pipeline = Pipeline(max_lag, generates=10, trains=10, versions=40)

    assert in_turn / pipeline.run() >= 1.7
    assert pipeline.staleness.stats().rows.dropped == 0
    assert max(pipeline.staleness.lags) == 1  # what they need, not what they may


@pytest.mark.parametrize(("generates", "trains"), [(10, 4), (4, 10)])
def test_the_slower_one_never_waits(generates: int, trains: int) -> None:
    pipeline = Pipeline(1, generates, trains, versions=40)

    assert pipeline.run() <= 40 * max(generates, trains) + min(generates, trains)
    assert pipeline.staleness.stats().rows.dropped == 0
