"""Thousands of schedules of leases, training, failures and saves: the account of rows and the bound always hold."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.channels.staleness_model import Loop

picks = st.integers(0, 4)
patience = st.sampled_from([None, 0.0, 2.0])


class StalenessMachine(RuleBasedStateMachine):
    @initialize(max_lag=st.integers(0, 3), rows_per_version=st.integers(1, 5), depth=st.integers(0, 4))
    def build(self, max_lag: int, rows_per_version: int, depth: int) -> None:
        self.loop = Loop(max_lag, rows_per_version, depth)

    @rule(rows=st.integers(0, 20), patience=patience)
    def begin(self, rows: int, patience: float | None) -> None:
        self.loop.begin(rows, patience)

    @rule(number=picks, share=picks, behind=st.integers(0, 3))
    def accept(self, number: int, share: int, behind: int) -> None:
        self.loop.accept(number, share, behind)

    @rule(number=picks, share=picks)
    def drop(self, number: int, share: int) -> None:
        self.loop.drop(number, share)

    @rule(number=picks)
    def end(self, number: int) -> None:
        self.loop.end(number)

    @rule(number=picks, start=st.integers(0, 3))
    def discard(self, number: int, start: int) -> None:
        self.loop.discard(number, start)

    @rule(number=picks)
    def cancel(self, number: int) -> None:
        self.loop.cancel(number)

    @rule()
    def train(self) -> None:
        self.loop.train()

    @rule(by=st.integers(1, 3), trained=st.sampled_from([None, 0, 1, 7]), serving=st.booleans())
    def advance(self, by: int, trained: int | None, serving: bool) -> None:
        self.loop.advance(by, trained, serving)

    @rule()
    def serve(self) -> None:
        self.loop.serve()

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        self.loop.wait(seconds)

    @rule(with_ready=st.booleans())
    def reload(self, with_ready: bool) -> None:
        self.loop.reload(with_ready)


StalenessMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestStalenessMachine = StalenessMachine.TestCase


def a_step(loop: Loop, chance: random.Random) -> None:
    number = chance.randrange(5)
    usual = [
        lambda: loop.begin(chance.randrange(20), chance.choice([None, 0.0, 2.0])),
        lambda: loop.accept(number, chance.choice([0, 0, 2]), chance.randrange(2)),
        loop.train,
    ]
    rare = [
        lambda: loop.drop(number, chance.randrange(4)),
        lambda: loop.end(number),
        lambda: loop.discard(number, chance.randrange(3)),
        lambda: loop.cancel(number),
        lambda: loop.advance(chance.randint(1, 2), chance.choice([None, 0, 3]), chance.random() < 0.5),
        loop.serve,
        lambda: loop.wait(1.0),
        lambda: loop.reload(chance.random() < 0.5),
    ]
    chance.choice(usual if chance.random() < 0.7 else rare)()


@pytest.mark.parametrize(
    "block", [*range(10), *(pytest.param(n, marks=pytest.mark.soak) for n in range(10, 100))]
)
def test_every_row_is_accounted_for_and_none_too_old_in_seeded_schedules(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        chance = random.Random(seed)
        loop = Loop(chance.randrange(4), chance.randint(1, 6), chance.randrange(4))

        for _ in range(20):
            a_step(loop, chance)

        everybody_gets_through(loop, chance)


def everybody_gets_through(loop: Loop, chance: random.Random) -> None:
    """Leases end, the trainer trains when it has a version's rows, and all who wait begin."""
    for _ in range(500):
        if not loop.checked.asked:
            return
        loop.accept(0, 0, 0) if loop.checked.running and chance.random() < 0.7 else loop.end(0)
        loop.train()
        loop.serve()
    assert not loop.checked.asked
