"""Seconds per step of verl's trainers, and to the first one, under both controllers in turn."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.environment import verl_python
from bench.stats import Case, Goal, Sample
from bench.trainers.models import small_models
from bench.trainers.programs import Program, main_ppo, sft
from bench.trainers.running import CONTROLLERS, VERL, start

SCENARIO = "verl_trainers"
TURNS = 5
PATIENCE = 600.0
STEPS: Mapping[str, int] = {"sft": 31, "main_ppo": 6}
#: Measured from this step on: before it, memory is allocated and code is compiled for the first time.
FROM = 2


def goals() -> dict[Case, tuple[Goal, ...]]:
    """A step costs at most a twentieth more than under verl's own controller; the first one comes no later."""
    found: dict[Case, tuple[Goal, ...]] = {}
    for name in STEPS:
        found[step_of(name)] = (Goal(VERL, 1.05),)
        found[first_step_of(name)] = (Goal(VERL, 1.0),)
    return found


def step_of(name: str) -> Case:
    return Case(SCENARIO, 2, variant=f"{name}, one step")


def first_step_of(name: str) -> Case:
    return Case(SCENARIO, 2, variant=f"{name}, start to first step")


def measure(say: Callable[[str], None], turns: int = TURNS) -> list[Sample]:
    """Run each program ``turns`` times under each controller; a run gives the median of its steps as one repetition."""
    python = verl_python()
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="pxt") as folder:
        data = small_models(python, Path(folder) / "data")
        programs = {
            "sft": sft(data, STEPS["sft"]).having("trainer.total_epochs=100"),
            "main_ppo": main_ppo(data, STEPS["main_ppo"]).having("trainer.test_freq=-1"),
        }
        for name, program in programs.items():
            for turn in range(turns):
                for controller in CONTROLLERS if turn % 2 == 0 else CONTROLLERS[::-1]:
                    load = os.getloadavg()[0]
                    times = _run(
                        program, controller, python, data, Path(folder) / f"{name}-{turn}-{controller}"
                    )
                    step = statistics.median(
                        b - a for a, b in zip(times[FROM - 1 :], times[FROM:], strict=False)
                    )
                    samples.append(Sample(step_of(name), controller, step))
                    samples.append(Sample(first_step_of(name), controller, times[0]))
                    measured = f"step {step:.3f} s, first after {times[0]:.1f} s, load before {load:.1f}"
                    say(f"note: {name} under {controller}: {measured}")
    return samples


def _run(program: Program, controller: str, python: Path, data: Path, folder: Path) -> list[float]:
    running = start(program, controller, python, data, folder)
    ended = running.result(PATIENCE)
    if ended.code != 0 or len(ended.metrics) != STEPS[program.name]:
        raise RuntimeError(
            f"{program.name} under {controller} ended with {ended.code} after {len(ended.metrics)} of "
            f"{STEPS[program.name]} steps:\n{running.tail()}"
        )
    return ended.step_times()
