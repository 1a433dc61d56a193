"""Faults during faults: ranks die while others are replaced, or during a snapshot."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Generator, Iterator

import pytest

import phalanx as px
from phalanx.testing import faults
from phalanx.testing.scripted import random_script, scripted
from tests.members.ledger import Ledger
from tests.support.lifecycle_steps import noted_steps

RANKS = 4


def play(seed: int, policy: px.ReplacePolicy | None) -> Iterator[object]:
    """Play one schedule of a group, ranks of which die at any time; with a policy it recovers by itself.

    Yields errors, results of steps with the results that are allowed, and the last epoch.
    """
    choice = random.Random(seed)
    with (
        scripted(random_script(seed, probability=0.03)) as transport,
        px.ResourcePool([RANKS], use_gpu=False, backend="inline") as pool,
    ):
        try:
            group = px.WorkerGroup(pool, Ledger, call_timeout=5.0, start_timeout=20.0, on_failure=policy)
        except px.PhalanxError as error:
            yield error
            return
        done: list[int] = []
        kept: list[int] | None = None
        whole = True  # no call has failed since `done` was the state
        for number in range(12):
            try:
                found = group.add(number)
                may_be = [[*done, number]] if whole else [[*(kept or []), number], [number]]
                yield found, [[one] * RANKS for one in may_be]
                done, whole = found[0], True
                if choice.random() < 0.7:
                    px.snapshot(group)
                    kept = list(done)
            except px.PhalanxError as error:
                yield error
                if policy is None:
                    done, kept = yield from mended(group, choice, kept)
                else:
                    whole = False
                    broken(group, choice)
            if choice.random() < 0.4 and group.core.endpoints:
                faults.kill(group, choice.randrange(RANKS))
            transport.clock.advance(choice.random() * 20)
        yield group.epoch
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


def broken(group: px.WorkerGroup, choice: random.Random) -> None:
    """Break a group if its last call failed on some ranks only, so that the group recovers."""
    while group.state == "ready":
        faults.kill(group, choice.randrange(RANKS))
        with contextlib.suppress(px.PhalanxError):
            group.add(-1)


def blocks(policy: px.ReplacePolicy | None, fast: int, count: int) -> list[object]:
    soak = [pytest.param(policy, block, marks=pytest.mark.soak) for block in range(fast, count)]
    return [*((policy, block) for block in range(fast)), *soak]


@pytest.mark.parametrize(
    ("policy", "block"), [*blocks(None, 3, 10), *blocks(px.ReplacePolicy(max_failures=1000), 1, 5)]
)
def test_schedules_of_faults_end_in_library_errors_or_a_group_with_correct_state(
    policy: px.ReplacePolicy | None, block: int
) -> None:
    steps_after_a_step = recoveries = 0
    for seed in range(block * 30, block * 30 + 30):
        with noted_steps() as steps:
            ends = list(play(seed, policy))
        for end in ends:
            assert not isinstance(end, px.errors.InternalError), seed
            recoveries += end if isinstance(end, int) else 0
            if isinstance(end, tuple):
                found, may_be = end
                assert found in may_be, seed
                steps_after_a_step += len(found[0]) > 1
        assert all(step.allowed for step in steps)
    assert steps_after_a_step > 30
    assert recoveries > 5
