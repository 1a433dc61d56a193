"""Faults during faults: ranks die while others are replaced, or during a snapshot."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator

import pytest

import phalanx as px
from phalanx.testing import faults
from phalanx.testing.scripted import random_script, scripted
from tests.members.ledger import Ledger
from tests.support.lifecycle_steps import noted_steps

RANKS = 4


def play(seed: int) -> Iterator[object]:
    """Play one schedule. Yield errors, and results of steps with the expected results."""
    choice = random.Random(seed)
    with (
        scripted(random_script(seed, probability=0.03)) as transport,
        px.ResourcePool([RANKS], use_gpu=False, backend="inline") as pool,
    ):
        try:
            group = px.WorkerGroup(pool, Ledger, call_timeout=5.0, start_timeout=20.0)
        except px.PhalanxError as error:
            yield error
            return
        done: list[int] = []
        kept: list[int] | None = None
        for number in range(10):
            try:
                found = group.add(number)
                done.append(number)
                yield found, [list(done)] * RANKS
                if choice.random() < 0.7:
                    px.snapshot(group)
                    kept = list(done)
            except px.PhalanxError as error:
                yield error
                done, kept = yield from mended(group, choice, kept)
            if choice.random() < 0.4:
                faults.kill(group, choice.randrange(RANKS))
            transport.clock.advance(choice.random() * 20)
        group.close()


def mended(
    group: px.WorkerGroup, choice: random.Random, kept: list[int] | None
) -> Generator[object, None, tuple[list[int], list[int] | None]]:
    """Replace lost ranks until that works, or restart. Return the calls in the state and in the snapshot."""
    for _ in range(3):
        try:
            if px.replace_ranks(group, [choice.randrange(RANKS)]):
                return list(kept or []), kept
        except px.PhalanxError as error:
            yield error
            if "restart() recreates" in str(error) or "there is no snapshot" in str(error):
                break
    for _ in range(20):
        try:
            group.restart()
            return [], None
        except px.PhalanxError as error:
            yield error
    raise AssertionError("the group was not to be had again")


@pytest.mark.parametrize(
    "block", [0, 1, 2, *(pytest.param(block, marks=pytest.mark.soak) for block in range(3, 10))]
)
def test_300_schedules_of_faults_end_in_library_errors_or_a_group_with_correct_state(block: int) -> None:
    steps_after_a_step = 0
    for seed in range(block * 30, block * 30 + 30):
        with noted_steps() as steps:
            ends = list(play(seed))
        assert not [end for end in ends if isinstance(end, px.errors.InternalError)], seed
        for end in ends:
            if isinstance(end, tuple):
                found, expected = end
                assert found == expected, seed
                steps_after_a_step += len(found[0]) > 1
        assert all(step.allowed for step in steps)
    assert steps_after_a_step > 30
