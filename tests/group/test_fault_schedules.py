"""Random schedules of faults under a group that is called, restarted and resized."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

import phalanx as px
from phalanx.group.lifecycle import State
from phalanx.testing.scripted import random_script, scripted
from tests.support.lifecycle_steps import noted_steps


class Counter(px.Worker):
    """A worker that returns its rank and the number. A restart reruns ``load``."""

    @px.register(rerun_on_restart=True)
    def load(self, number: int) -> None:
        self.loaded = number

    @px.register
    def add(self, number: int) -> tuple[int, int]:
        return self.rank, number


class Independent(Counter):
    independent = True


@dataclass
class Story:
    """The outcome of a schedule: ``answers`` are results with the numbers that were sent."""

    errors: list[BaseException] = field(default_factory=list)
    answers: list[tuple[int, list[tuple[int, int]]]] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    left: int = 0


def play(seed: int) -> Story:
    choice, story = random.Random(seed), Story()
    independent = seed % 2 == 0
    policy = px.RestartPolicy(max_restarts=3, window_s=100.0) if seed % 3 == 0 else None
    waiting: list[tuple[int, px.CallFuture[Any]]] = []

    def move(group: px.WorkerGroup, number: int) -> None:
        match choice.randrange(11):
            case 0:
                group.load(number)
            case 1 | 2:
                chosen = group.any if independent else group
                waiting.append((number, chosen.add.submit(number)))
            case 3 if waiting:
                asked, future = waiting.pop(0)
                found = future.result(timeout=1.0)
                story.answers.append((asked, found if isinstance(found, list) else [found]))
            case 4 if waiting:
                waiting.pop(0)[1].cancel()
            case 5 if not independent or group.state == "broken":
                group.restart()
            case 6:
                found = list(group[0:2].add.submit(number).stream())
                story.answers.append((number, [result for _, result in found]))
            case 7 | 8 | 9 if independent:
                size = choice.randrange(1, 5)
                px.resize(group, size, timeout=3.0)
                story.sizes.append((size, len(group)))
            case _:
                story.answers.append((number, group.add.options(timeout=2.0)(number)))

    with (
        scripted(random_script(seed, 0.04 if independent else 0.08)) as transport,
        px.ResourcePool([4], use_gpu=False, backend="inline") as pool,
    ):
        try:
            worker = Independent if independent else Counter
            group = px.WorkerGroup(pool, worker, call_timeout=5.0, start_timeout=20.0, on_failure=policy)
        except px.PhalanxError as error:
            story.errors.append(error)
            return story
        for number in range(16):
            try:
                move(group, number)
            except px.PhalanxError as error:
                story.errors.append(error)
            transport.clock.advance(choice.random() * 20)
        story.errors += [error for _, future in waiting if (error := future.exception()) is not None]
        group.close()
        story.left = sum(1 for slot in pool.slots for _ in pool.holdings[slot.pool].groups.get(slot, ()))
    return story


@pytest.mark.parametrize("block", range(3))
def test_fault_schedules_end_in_right_answers_or_library_errors_and_leave_no_rank(block: int) -> None:
    with noted_steps() as steps:
        stories = [play(seed) for seed in range(block * 160, block * 160 + 160)]

    errors = [error for one in stories for error in one.errors]
    assert not [error for error in errors if isinstance(error, px.errors.InternalError)]
    assert any("leave with the next px.resize" in str(error) for error in errors)
    assert all(rank[1] == asked for one in stories for asked, found in one.answers for rank in found)
    assert all(size == found for one in stories for size, found in one.sizes)
    assert not [one for one in stories if one.left]
    assert all(step.allowed for step in steps)
    assert {step.after for step in steps} >= {State.READY, State.BROKEN, State.RESTARTING, State.CLOSED}
    assert sum(len(one.sizes) for one in stories) > 100
