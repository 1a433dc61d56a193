"""The benchmark's walk through its plan, with contenders that answer at once."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bench import runner
from bench.runner import Run
from bench.scenarios import BARE, FULL, PHALANX, Block, Step, blocks
from bench.stats import Case

CASE = Case("flow", 1, kilobytes=1, variant="500 items a rank")


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def monotonic(self) -> float:
        return self.time


class Answers:
    """A contender whose turns take ``seconds`` for 500 items."""

    pid = 0

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds
        self.asked: list[int] = []

    def ask(self, op: str, **args: Any) -> float:
        if op == "flow":
            self.asked.append(args["items"])
            self.clock.time += self.seconds * args["items"] / 500
        return self.seconds


def walked(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> dict[str, list[int]]:
    clock = Clock()
    monkeypatch.setattr(runner, "time", clock)
    names = {"phalanx": PHALANX, "bare": BARE}
    peers = {names[name]: Answers(clock, value) for name, value in seconds.items()}
    step = Step(CASE, "flow", {"items": 500}, tuple(peers), 5, seconds=6.0, warming={"items": 50})
    Run(dict(peers), math.inf, lambda _: None).walk(Block(1, apart=(step,), apart_groups=("a", "b")))  # type: ignore[arg-type]
    return {name: peer.asked for name, peer in peers.items()}


def test_a_slow_contender_is_repeated_less_often_but_at_least_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = walked(monkeypatch, phalanx=0.5, bare=2.5)
    assert asked == {PHALANX: [50] + 5 * [500], BARE: [50] + 3 * [500]}
    assert walked(monkeypatch, bare=70.0)[BARE] == [50, 500]


def test_the_plan_has_every_case_of_flow() -> None:
    steps = [step for block in blocks(FULL) for step in block.apart if step.op == "flow"]
    found = {(step.case.ranks, step.case.kilobytes + 1024 * step.case.megabytes) for step in steps}
    assert found == {(ranks, size) for ranks in (1, 2, 4) for size in (1, 1024, 64 * 1024)}
    assert all(step.seconds < math.inf for step in steps)
