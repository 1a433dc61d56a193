"""Thousands of schedules of puts, takes, deaths, closes and saves: the account of a channel always holds."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.channels.channel_model import Actors

numbers = st.integers(0, 2)
picks = st.integers(0, 5)
patience = st.sampled_from([None, 0.0, 2.0])
rows = st.sampled_from([None, 0, 1, 3, 8])


class ChannelMachine(RuleBasedStateMachine):
    @initialize(maxsize=st.sampled_from([None, 1, 4, 12]), by=st.sampled_from(["items", "bytes"]))
    def begin(self, maxsize: int | None, by: Any) -> None:
        self.actors = Actors(maxsize, by)

    @rule(number=numbers, rows=rows, nbytes=st.integers(0, 20), patience=patience)
    def put(self, number: int, rows: int | None, nbytes: int, patience: float | None) -> None:
        self.actors.put(number, rows, nbytes, patience)

    @rule(number=numbers, count=st.integers(1, 9), by_rows=st.booleans(), patience=patience)
    def take(self, number: int, count: int, by_rows: bool, patience: float | None) -> None:
        self.actors.take(number, count, by_rows, patience)

    @rule(number=picks)
    def cancel(self, number: int) -> None:
        self.actors.cancel(number)

    @rule(number=picks)
    def acknowledge(self, number: int) -> None:
        self.actors.acknowledge(number)

    @rule(number=picks, unreadable=st.booleans())
    def give_back(self, number: int, unreadable: bool) -> None:
        self.actors.give_back(number, unreadable)

    @rule(number=picks)
    def drop(self, number: int) -> None:
        self.actors.drop(number)

    @rule(number=picks)
    def kill(self, number: int) -> None:
        self.actors.kill(number)

    @rule(number=numbers, handoff=st.booleans())
    def close_producer(self, number: int, handoff: bool) -> None:
        self.actors.close_producer(number, handoff)

    @rule()
    def hand_over(self) -> None:
        self.actors.hand_over()

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        self.actors.wait(seconds)

    @rule()
    def reload(self) -> None:
        self.actors.reload()

    @rule(how=st.sampled_from(["finish", "close"]))
    def end(self, how: str) -> None:
        getattr(self.actors, how)()


ChannelMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestChannelMachine = ChannelMachine.TestCase


def a_step(actors: Actors, chance: random.Random) -> None:
    patience = chance.choice([None, None, 0.0, 2.0])
    number = chance.randrange(3)
    # Half of all steps move items; the others are deaths, closes and the like.
    kind = chance.choice(["put"] * 6 + ["take"] * 3 + ["acknowledge"] * 3 + ["rare"] * 4)
    if kind == "put":
        actors.put(number, chance.choice([1, 2, 5, 5, 0]), chance.randrange(20), patience)
    elif kind == "take":
        actors.take(number, chance.randint(1, 9), chance.random() < 0.5, patience)
    elif kind == "acknowledge":
        actors.acknowledge(chance.randrange(6))
    else:
        a_rare_step(actors, chance)


def a_rare_step(actors: Actors, chance: random.Random) -> None:
    number = chance.randrange(6)
    chance.choice(
        [
            lambda: actors.cancel(number),
            lambda: actors.give_back(number, unreadable=number == 0),
            lambda: actors.drop(number),
            lambda: actors.kill(number),
            lambda: actors.close_producer(number % 3, handoff=number < 3),
            actors.hand_over,
            lambda: actors.wait(1.0),
            actors.reload,
        ]
    )()


@pytest.mark.parametrize(
    "block", [*range(10), *(pytest.param(n, marks=pytest.mark.soak) for n in range(10, 100))]
)
def test_nothing_vanishes_or_counts_twice_in_seeded_schedules(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        chance = random.Random(seed)
        actors = Actors(chance.choice([None, 1, 4, 12]), chance.choice(["items", "bytes"]))

        for _ in range(20):
            a_step(actors, chance)
        chance.choice([actors.finish, actors.finish, actors.close])()
        for _ in range(5):  # processes die, give back and hand over while it ends, too
            a_step(actors, chance)

        drained(actors, chance)


def drained(actors: Actors, chance: random.Random) -> None:
    """Consumers go on until the channel is empty: it never stands still before that."""
    channel = actors.channel
    for _ in range(200):
        if not channel.waiting and not channel.leased and not channel.asked:
            break
        actors.take(chance.randrange(3), 2, by_rows=False, patience=0.0)
        for lease in list(channel.leased):
            actors.acknowledge(list(channel.leased).index(lease))
    tally = channel.home.items
    assert tally.submitted == tally.delivered + tally.dropped + tally.lost
