"""What the examples have around their algorithms: a bar, a picture, threads beside, where a run is saved."""

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
    """Whether each rank gets a GPU; on ``auto``, if there are enough of them (NCCL needs one per rank)."""
    return device == "gpu" or (device == "auto" and torch.cuda.device_count() >= ranks)


def shown(rewards: Iterator[float], steps: int, console: Console, done: int = 0) -> Iterator[float]:
    """Pass the rewards on, with a progress bar; in a log, with a line now and then."""
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
    """Mean reward over steps, as a picture."""
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
    """Two threads that produce while the block runs. When one fails the channel ends, and its error is raised."""

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
    for future in futures:
        future.result()


def add_saving(parser: argparse.ArgumentParser) -> None:
    """The options that :class:`Saving` is made from."""
    parser.add_argument(
        "--save", metavar="PATH", help="where the run is saved, by all ranks; see `phalanx runs`"
    )
    parser.add_argument("--save-every", type=int, default=Saving.every, metavar="STEPS")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last step that --save has whole"
    )


@dataclass(frozen=True)
class Saving:
    """Where the run is saved, if it is, and how often; whether it goes on from what is there."""

    path: str | None = None
    """Or a URL, which a ``Path`` would change."""
    resume: bool = False
    every: int = 10

    @contextmanager
    def run(
        self, groups: Mapping[str, Any], state: dict[str, Any], **links: Any
    ) -> Generator[px.checkpoint.CheckpointManager | None]:
        """The run of these groups and this state, until the block ends; None where nothing is saved."""
        if self.path is None:
            yield None
            return
        with px.checkpoint.CheckpointManager(self.path, groups, state=state, **links) as run:
            if run.steps() and not self.resume:
                raise SystemExit(f"{self.path} has a run: --resume goes on with it, or give another path")
            yield run

    def resumed(self, run: px.checkpoint.CheckpointManager | None) -> int:
        """Have everything as it was at the last whole step; its number, 0 where there is none."""
        return (run.resume() or 0) if run is not None else 0

    def is_due(self, step: int, steps: int) -> bool:
        """Whether a step is saved: some, and the last one."""
        return self.path is not None and (step % self.every == 0 or step == steps)


NOT_SAVED = Saving()
