"""Helpers around the algorithms of the examples: progress bar, reward curve, producer threads, saved runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import phalanx as px


def wants_gpu(device: str, ranks: int) -> bool:
    """Return whether each rank gets a GPU; ``auto``: if there are enough of them (NCCL needs one per rank)."""
    return device == "gpu" or (device == "auto" and torch.cuda.device_count() >= ranks)


def shown(rewards: Iterator[float], steps: int, console: Console, done: int = 0) -> Iterator[float]:
    """Yield the rewards and show a progress bar; in a log, print a line now and then."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("reward {task.fields[reward]:.3f}"),
        TimeElapsedColumn(),
    )
    with Progress("GRPO", *columns, console=console) as progress:
        task = progress.add_task("", total=steps, completed=done, reward=0.0)
        for step, reward in enumerate(rewards, start=done + 1):
            progress.update(task, advance=1, reward=reward)
            if not console.is_terminal and step % 50 == 0:
                console.print(f"step {step}: mean reward {reward:.3f}")
            yield reward


def save_curve(rewards: Sequence[float], path: Path) -> None:
    """Save the mean reward over steps as a picture."""
    window = 10
    smooth = [sum(rewards[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(rewards))]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(rewards, color="tab:blue", alpha=0.3, label="each step")
    axes.plot(smooth, color="tab:blue", label=f"mean of {window} steps")
    axes.set(
        xlabel="step", ylabel="mean reward", ylim=(0, 1.02), title="GRPO: a small Llama learns to copy digits"
    )
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


@contextmanager
def beside(
    produce: Callable[[], None], answers: px.Channel, staleness: px.StalenessManager
) -> Generator[None]:
    """Run two producer threads during the block. If a thread fails, close the channel and raise its error."""

    def work() -> None:
        try:
            produce()
        except BaseException:
            answers.finish()
            raise

    with ThreadPoolExecutor(2, thread_name_prefix="producer") as threads:
        futures = [threads.submit(work) for _ in range(2)]
        try:
            yield
        except px.channels.ChannelClosed:
            if all(future.exception() is None for future in futures):
                raise
        finally:
            staleness.close()  # who waits for a lease waits no more
    failures = [error for future in futures if (error := future.exception()) is not None]
    if failures:  # the other producer may have found the channel finished
        raise min(failures, key=lambda error: isinstance(error, px.channels.ChannelClosed))


def add_saving(parser: argparse.ArgumentParser) -> None:
    """Add the options from which :class:`Saving` is made."""
    parser.add_argument(
        "--save", metavar="PATH", help="where the run is saved, by all ranks; see `phalanx runs`"
    )
    parser.add_argument("--save-every", type=int, default=Saving.every, metavar="STEPS")
    parser.add_argument(
        "--resume", action="store_true", help="continue from the last complete step of --save"
    )


@dataclass(frozen=True)
class Saving:
    """Where and how often the run is saved, and whether a saved run is resumed."""

    path: str | None = None
    """Path or URL; a ``Path`` would change a URL."""
    resume: bool = False
    every: int = 10

    @contextmanager
    def run(
        self, groups: Mapping[str, Any], state: dict[str, Any], **links: Any
    ) -> Generator[px.checkpoint.CheckpointManager | None]:
        """Return the manager of these groups and this state until the block ends; None if nothing is saved."""
        if self.path is None:
            yield None
            return
        with px.checkpoint.CheckpointManager(self.path, groups, state=state, **links) as run:
            if run.steps() and not self.resume:
                raise SystemExit(f"{self.path} has a run: --resume goes on with it, or give another path")
            yield run

    def resumed(self, run: px.checkpoint.CheckpointManager | None) -> int:
        """Restore the last complete step. Return its number, or 0 without a step."""
        return (run.resume() or 0) if run is not None else 0

    def is_due(self, step: int, steps: int) -> bool:
        """Return whether a step is saved: regular steps and the last."""
        return self.path is not None and (step % self.every == 0 or step == steps)


NOT_SAVED = Saving()
