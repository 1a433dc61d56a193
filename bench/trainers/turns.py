"""Seconds per step of verl's trainers, and to the first step, under both controllers in turn."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.environment import verl_python
from bench.stats import Case, Goal, Sample
from bench.trainers.models import small_models
from bench.trainers.processes import cpu_seconds, new_mark
from bench.trainers.programs import Program, main_ppo, sft
from bench.trainers.running import CONTROLLERS, VERL, start

SCENARIO = "verl_trainers"
TURNS = 5
PATIENCE = 600.0
STEPS: Mapping[str, int] = {"sft": 31, "main_ppo": 6}
#: Measured from this step on: before it, memory is allocated and code is compiled for the first time.
FROM = 2


def goals() -> dict[Case, tuple[Goal, ...]]:
    """Return the bounds: a step at most 5 % slower than under verl's controller, the first step no later."""
    found: dict[Case, tuple[Goal, ...]] = {}
    for name in STEPS:
        found[step_of(name)] = (Goal(VERL, 1.05),)
        found[first_step_of(name)] = (Goal(VERL, 1.0),)
    return found


def step_of(name: str) -> Case:
    return Case(SCENARIO, 2, variant=f"{name}, one step")


def cpu_of(name: str) -> Case:
    return Case(SCENARIO, 2, variant=f"{name}, CPU time of one step")


def cpu_to_first_step_of(name: str) -> Case:
    return Case(SCENARIO, 2, variant=f"{name}, CPU time to first step")


def first_step_of(name: str) -> Case:
    return Case(SCENARIO, 2, variant=f"{name}, start to first step")


def measure(
    say: Callable[[str], None], turns: int = TURNS, names: Sequence[str] = tuple(STEPS)
) -> list[Sample]:
    """Run each program ``turns`` times under each controller. The median step of a run is a repetition."""
    python = verl_python()
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="pxt") as folder:
        data = small_models(python, Path(folder) / "data")
        programs = {
            "sft": sft(data, STEPS["sft"]).having("trainer.total_epochs=100"),
            "main_ppo": main_ppo(data, STEPS["main_ppo"]).having("trainer.test_freq=-1"),
        }
        for name in names:
            program = programs[name]
            for turn in range(turns):
                for controller in CONTROLLERS if turn % 2 == 0 else CONTROLLERS[::-1]:
                    load = os.getloadavg()[0]
                    times, used = _run(
                        program, controller, python, data, Path(folder) / f"{name}-{turn}-{controller}"
                    )
                    step = statistics.median(
                        b - a for a, b in zip(times[FROM - 1 :], times[FROM:], strict=False)
                    )
                    samples.append(Sample(step_of(name), controller, step))
                    samples.append(Sample(first_step_of(name), controller, times[0]))
                    used_by = {kind: (used[-1][kind] - used[0][kind]) / (len(times) - 2) for kind in used[0]}
                    samples.append(Sample(cpu_of(name), controller, sum(used_by.values())))
                    samples.append(Sample(cpu_to_first_step_of(name), controller, sum(used[0].values())))
                    said = ", ".join(f"{kind} {seconds:.3f}" for kind, seconds in used_by.items())
                    measured = (
                        f"step {step:.3f} s, CPU of a step: {said} s; first after {times[0]:.1f} s with "
                        f"{sum(used[0].values()):.1f} s of CPU; load before {load:.1f}"
                    )
                    say(f"note: {name} under {controller}: {measured}")
    return samples


def _run(
    program: Program, controller: str, python: Path, data: Path, folder: Path
) -> tuple[list[float], list[dict[str, float]]]:
    """Return the time of each logged step, and the CPU time used until the first and until the last step but one.

    At the last step processes end before its line arrives.
    """
    mark = new_mark()
    used: list[dict[str, float]] = []

    def read(line: str) -> None:
        if "step:1 - " in line or f"step:{STEPS[program.name] - 1} - " in line:
            used.append(cpu_seconds(mark))

    running = start(program, controller, python, data, folder, env=mark, also=read)
    ended = running.result(PATIENCE)
    if ended.code != 0 or len(ended.metrics) != STEPS[program.name]:
        raise RuntimeError(
            f"{program.name} under {controller} ended with {ended.code} after {len(ended.metrics)} of "
            f"{STEPS[program.name]} steps:\n{running.tail()}"
        )
    return ended.step_times(), used
