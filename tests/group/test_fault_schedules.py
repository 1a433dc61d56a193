"""Random schedules of faults: every call ends in a result or in an error of the library."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

import phalanx as px
from phalanx.group.lifecycle import State
from phalanx.testing.scripted import random_script, scripted
from tests.support.lifecycle_steps import noted_steps


class Counter(px.Worker):
    """A worker that counts calls. A restart reruns ``load``."""

    def __init__(self) -> None:
        self.loaded = 0
        self.count = 0

    @px.register(rerun_on_restart=True)
    def load(self, number: int) -> None:
        self.loaded = number

    @px.register
    def add(self, number: int) -> tuple[int, int]:
        self.count += number
        return self.rank, self.loaded


def play(seed: int) -> Iterator[object]:
    """Run a schedule, and yield the result or error of each call."""
    choice = random.Random(seed)
    policy = px.RestartPolicy(max_restarts=2, window_s=100.0) if seed % 3 == 0 else None
    with (
        scripted(random_script(seed)) as transport,
        px.ResourcePool([3], use_gpu=False, backend="inline") as pool,
    ):
        try:
            group = px.WorkerGroup(pool, Counter, call_timeout=5.0, start_timeout=20.0, on_failure=policy)
        except px.PhalanxError as error:
            yield error
            return
        waiting: list[px.CallFuture] = []
        for number in range(12):
            try:
                move = choice.randrange(8)
                if move == 0:
                    yield group.load(number)
                elif move == 1:
                    waiting.append(group.add.submit(number))
                elif move == 2 and waiting:
                    yield waiting.pop(0).result(timeout=1.0)
                elif move == 3 and waiting:
                    yield waiting.pop(0).cancel()
                elif move == 4:
                    group.restart()
                elif move == 5:
                    yield list(group[0:2].add.submit(number).stream())
                else:
                    yield group.add.options(timeout=2.0)(number)
            except px.PhalanxError as error:
                yield error
            transport.clock.advance(choice.random() * 20)
        for future in waiting:
            yield future.exception()
        group.close()


@pytest.mark.parametrize("block", range(10))
def test_fault_schedules_end_in_results_or_library_errors_and_allowed_states(block: int) -> None:
    with noted_steps() as steps:
        schedules = [list(play(seed)) for seed in range(block * 30, block * 30 + 30)]

    assert not [end for ends in schedules for end in ends if isinstance(end, px.errors.InternalError)]
    assert all(step.allowed for step in steps)
    assert {step.after for step in steps} >= {State.READY, State.BROKEN, State.RESTARTING, State.CLOSED}
