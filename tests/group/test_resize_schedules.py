"""Random schedules of faults under a group that is resized: right results or expected errors, and never a hang."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

import phalanx as px
from phalanx.testing.scripted import random_script, scripted
from tests.support.lifecycle_steps import noted_steps


class Counter(px.Worker):
    independent = True

    def __init__(self) -> None:
        self.loaded = 0

    @px.register(rerun_on_restart=True)
    def load(self, number: int) -> None:
        self.loaded = number

    @px.register
    def add(self, number: int) -> tuple[int, int]:
        return self.rank, number


@dataclass
class Story:
    """The outcome of a schedule."""

    errors: list[BaseException] = field(default_factory=list)
    answers: list[tuple[int, tuple[int, int]]] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    left: int = 0


def play(seed: int) -> Story:
    choice, story = random.Random(seed), Story()
    policy = px.RestartPolicy(max_restarts=3, window_s=100.0) if seed % 2 else None
    with (
        scripted(random_script(seed, 0.04)) as transport,
        px.ResourcePool([4], use_gpu=False, backend="inline") as pool,
    ):
        try:
            group = px.WorkerGroup(pool, Counter, call_timeout=5.0, start_timeout=20.0, on_failure=policy)
        except px.PhalanxError as error:
            story.errors.append(error)
            return story
        waiting: list[tuple[int, px.CallFuture[tuple[int, int]]]] = []
        for number in range(20):
            try:
                move = choice.randrange(7)
                if move == 0:
                    group.load(number)
                elif move in (1, 2):
                    waiting.append((number, group.any.add.submit(number)))
                elif move == 3 and waiting:
                    asked, future = waiting.pop(0)
                    story.answers.append((asked, future.result()))
                elif move == 4:
                    assert [one[1] for one in group.add(number)] == [number] * len(group)
                elif move == 5 and group.state == "broken":
                    group.restart()
                else:
                    size = choice.randrange(1, 5)
                    px.resize(group, size, timeout=3.0)
                    story.sizes.append((size, len(group)))
            except px.PhalanxError as error:
                story.errors.append(error)
            transport.clock.advance(choice.random() * 10)
        for asked, future in waiting:
            try:
                story.answers.append((asked, future.result()))
            except px.PhalanxError as error:
                story.errors.append(error)
        group.close()
        story.left = sum(1 for slot in pool.slots for _ in pool.holdings[slot.pool].groups.get(slot, ()))
    return story


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(block, marks=pytest.mark.soak) for block in range(1, 6))]
)
def test_resize_schedules_end_in_right_answers_or_expected_errors_and_leave_no_rank(block: int) -> None:
    with noted_steps() as steps:
        stories = [play(seed) for seed in range(block * 50, block * 50 + 50)]

    assert not [
        error for one in stories for error in one.errors if isinstance(error, px.errors.InternalError)
    ]
    assert any("leave with the next px.resize" in str(error) for one in stories for error in one.errors)
    assert all(answer[1] == asked for one in stories for asked, answer in one.answers)
    assert all(size == found for one in stories for size, found in one.sizes)
    assert not [one for one in stories if one.left]
    assert all(step.allowed for step in steps)
    assert sum(len(one.sizes) for one in stories) > 100
