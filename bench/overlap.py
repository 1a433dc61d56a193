# pyright: reportMissingImports=false
"""Speedup of concurrent generation and training over the sequential form: `python bench/overlap.py`.

The algorithm is that of `examples/grpo_async.py`, in both forms on the same two groups, which train on as many rows.
The engine and the trainer are stand-ins that sleep for the rows of a step, independent of the machine's load: the time
of a step beyond the sleep is the library's overhead. With `--models` they are the example's own models, and
`examples/grpo.py` is the third form: engine and trainer in turn on the same processors, as many of each.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDERS = [str(ROOT), str(ROOT / "src"), str(ROOT / "examples")]
sys.path[:0] = FOLDERS
os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")])  # of the ranks, too

import grpo as colocated  # noqa: E402
import grpo_async as example  # noqa: E402
import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import phalanx as px  # noqa: E402
from phalanx.engines import Answer, Capabilities, ModelRunner, RolloutEngine, SampledToken, Vocabulary  # noqa: E402

WARM = 3
"""Steps that do not count: first uses are slower."""


class SleepingMachine(ModelRunner):
    """A runner that sleeps for each running answer and returns a token."""

    def __init__(self, seconds: float) -> None:
        self.capabilities = Capabilities(context=64)
        self.vocabulary = Vocabulary(context=64, end=frozenset(), size=16)
        self._seconds = seconds
        self._answers: dict[int, Answer] = {}

    def add(self, answers: Sequence[Answer]) -> None:
        self._answers.update((answer.key, answer) for answer in answers)

    def remove(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self._answers.pop(answer.key, None)

    async def step(self) -> list[SampledToken]:
        answers = list(self._answers.values())
        await asyncio.sleep(self._seconds * len(answers))
        return [SampledToken(answer, 1, -1.0) for answer in answers]

    def weights_changed(self) -> None:
        """Do nothing: no token was computed with the weights."""


class Engine(RolloutEngine):
    """An engine that sleeps instead of generating."""

    def __init__(self, seconds: float) -> None:
        self.serve(SleepingMachine(seconds), weights="policy")
        super(RolloutEngine, self).accept_weights("policy", torch.nn.Linear(8, 8))


class Actor(px.Worker):
    """A trainer that sleeps for each row."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.steps = seconds, 0
        self.model = torch.nn.Linear(8, 8)
        self.publish_weights("policy", self.model, step=lambda: self.steps)

    @px.register(px.Dispatch.ROWS, collect="list")
    def update(self, answers: Any, reference: Any) -> Any:
        time.sleep(self.seconds * len(answers["row"]))
        self.steps += 1
        with torch.no_grad():
            self.model.weight.add_(1.0)
        return SimpleNamespace(reward=0.0, rows=answers["row"].tolist())


class Reference(px.Worker):
    """A reference that returns the answers' log-probabilities."""

    @px.register(px.Dispatch.ROWS)
    def log_probs(self, answers: Any) -> Any:
        return answers["log_probs"]


@contextmanager
def stand_ins(settings: example.Settings, seconds: float) -> Generator[example.Groups]:
    """Yield an engine and a trainer that sleep for the rows of a step."""
    a_row = seconds / settings.rows
    roles = px.colocate({"actor": Actor.bind(a_row), "reference": Reference})
    with px.ResourcePool([3], use_gpu=False) as pool:
        yield example.Groups(
            rollout=px.WorkerGroup(pool[0:1], Engine.bind(a_row / settings.digits), name="rollout"),
            judge=px.WorkerGroup(pool[1:2], example.Judge, name="judge"),
            trainer=px.WorkerGroup(pool[2:3], roles, name="trainer"),
        )


def seconds_per_step(steps: Iterator[Any]) -> float:
    """Return the mean seconds of a step after the first steps."""
    times = [time.perf_counter() for _ in steps]
    return (times[-1] - times[WARM - 1]) / (len(times) - WARM)


def in_turn(groups: example.Groups, settings: example.Settings) -> float:
    """Return the seconds of a step if generation and training take turns."""
    return seconds_per_step(example.in_turn(groups, settings))


def at_once(groups: example.Groups, settings: example.Settings) -> float:
    """Return the seconds of a step if generation and training run concurrently.

    Raises:
        ValueError: if a row was lost, or older than allowed.
    """
    staleness = px.StalenessManager(settings.max_lag, rows_per_version=settings.rows)
    found = seconds_per_step(example.grpo(groups, settings, staleness))
    paced = staleness.stats
    rows = settings.rows * settings.steps
    if paced.rows.trained != rows or paced.rows.dropped or max(paced.lags) > settings.max_lag:
        raise ValueError(f"{rows} rows were to be trained on, none dropped: {staleness.explain()}")
    return found


def on_the_same(settings: example.Settings, ranks: int) -> float:
    """Return the seconds of a step of `examples/grpo.py`: as many engines as trainers, in turn on the same
    processors.
    """
    own = colocated.Settings(
        settings.digits, settings.questions, settings.group_size, settings.steps, seed=settings.seed
    )
    with px.ResourcePool([ranks], use_gpu=False) as pool, px.ResourcePool([1], use_gpu=False) as cpu:
        roles = px.colocate({"actor": colocated.Actor.bind(own), "reference": colocated.Reference.bind(own)})
        engine = colocated.TransformersRollout.bind(colocated.small_llama, weights="policy", seed=own.seed)
        groups = colocated.Groups(
            policy=px.WorkerGroup(pool, roles, name="policy"),
            rollout=px.WorkerGroup(pool, engine, name="rollout"),
            judge=px.WorkerGroup(cpu, colocated.Reward, name="judge"),
        )
        with px.WeightSync(groups.policy.actor, groups.rollout, "policy") as sync:
            random = torch.Generator().manual_seed(own.seed)
            return seconds_per_step(colocated.grpo(groups, sync, own, random))


def measured(turns: int, ways: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Return the seconds of a step of each form, by turn."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            found[name].append(way())
    return found


def table_of(title: str, found: dict[str, list[float]], rows: int) -> Table:
    """Return a table of medians and speedups."""
    table = Table(title=title)
    for column in ("", "ms of a step, median", "each turn", "rows per second", "against in turn"):
        table.add_column(column)
    base = statistics.median(found["in turn"])
    for name, seconds in found.items():
        median = statistics.median(seconds)
        each = " ".join(f"{1e3 * one:.0f}" for one in seconds)
        table.add_row(name, f"{1e3 * median:.1f}", each, f"{rows / median:.0f}", f"{base / median:.2f}x")
    return table


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", action="store_true", help="the example's models in place of stand-ins")
    parser.add_argument("--seconds", type=float, default=0.5, help="that a stand-in takes for a step's rows")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--max-lag", type=int, default=1)
    parser.add_argument("--questions", type=int, default=16, help="of a step, eight answers to each")
    parser.add_argument("--digits", type=int, default=4)
    given = parser.parse_args()
    settings = example.Settings(
        given.digits,
        given.questions,
        together=given.questions // 2,
        steps=WARM + given.steps,
        max_lag=given.max_lag,
    )
    px.init(num_cpus=4)
    groups_of = example.started(settings, 1, 1, "cpu") if given.models else stand_ins(settings, given.seconds)
    with groups_of as groups:
        found = measured(
            given.turns,
            {"in turn": lambda: in_turn(groups, settings), "at once": lambda: at_once(groups, settings)},
        )
    if given.models:
        found |= measured(given.turns, {"in turn, 2 ranks of both": lambda: on_the_same(settings, 2)})
    what = "the models of the example" if given.models else f"stand-ins that sleep {given.seconds:g} s a step"
    title = f"{what}, one engine and one trainer, {settings.rows} rows a step, lag at most {given.max_lag}"
    Console(width=140).print(table_of(title, found, settings.rows))
    px.shutdown()


if __name__ == "__main__":
    main()
