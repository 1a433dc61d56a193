"""Faults in a loop over two groups: each step counts once and on both groups, whenever ranks are lost."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

import phalanx as px
from phalanx.testing import faults
from phalanx.testing.scripted import random_script, scripted
from tests.members.test_replace_schedules import Ledger

RANKS, STEPS, MOST = 3, 8, 60


@dataclass
class Story:
    """Outcome of one schedule: errors, number of restores, and completed steps."""

    errors: list[BaseException] = field(default_factory=list)
    went_back: int = 0
    steps: int = 0


def play(seed: int) -> Story:
    choice, story = random.Random(seed), Story()
    policy = px.ReplacePolicy(max_failures=1000)
    with (
        scripted(random_script(seed, probability=0.015)) as transport,
        px.ResourcePool([RANKS], use_gpu=False, backend="inline") as pool,
    ):

        def made() -> px.WorkerGroup:
            return px.WorkerGroup(pool, Ledger, call_timeout=5.0, start_timeout=20.0, on_failure=policy)

        try:
            groups = made(), made()
        except px.PhalanxError as error:
            story.errors.append(error)
            return story
        done: list[int] = []
        ready = False  # whether both groups are at the point of ``done``
        for number in range(MOST):
            if len(done) == STEPS:
                break
            try:
                if not ready and not done:
                    for group in groups:
                        group.restart()
                    px.snapshot(*groups)
                elif not ready:
                    px.restore(*groups)
                    story.went_back += 1
                ready = False
                found = [group.add(number) for group in groups]
                assert found == [[[*done, number]] * RANKS] * 2, (seed, number)
                px.snapshot(*groups)
                done.append(number)
                ready = True
            except px.checkpoint.CheckpointError as error:  # a group was restarted, so there is no snapshot
                story.errors.append(error)
                done = []
            except px.PhalanxError as error:
                story.errors.append(error)
            killed = choice.choice(groups)
            if choice.random() < 0.3 and killed.core.endpoints:  # empty if a start was refused
                faults.kill(killed, choice.randrange(RANKS))
            transport.clock.advance(choice.random() * 20)
        story.steps = len(done)
    return story


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(block, marks=pytest.mark.soak) for block in range(1, 20))]
)
def test_200_schedules_of_faults_lose_and_repeat_no_completed_step(block: int) -> None:
    stories = [play(seed) for seed in range(block * 10, block * 10 + 10)]

    assert not [
        error for story in stories for error in story.errors if isinstance(error, px.errors.InternalError)
    ]
    assert sum(story.went_back for story in stories) > 10
    assert sum(story.steps == STEPS for story in stories) > 5
