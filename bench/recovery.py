"""Recovery time of a group that lost a rank: `python bench/recovery.py --ranks 4 --megabytes 64`.

Three ways in turn, each from the error of the kill to the end of the next step: `px.replace_ranks` and the snapshot,
`restart()` and the state of a saved step, and a new group with that state. The ranks import torch, form a process
group, and have a model of `--megabytes` with the state of Adam.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import phalanx as px  # noqa: E402

TURNS = 3


class Trainer(px.Worker):
    """Adam on one matrix; gradients are summed over the ranks."""

    def __init__(self, megabytes: float) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        self.model = torch.nn.Linear(256, max(1, int(megabytes * (1 << 20) / 4 / 256)), bias=False)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        px.register_state(self, model=self.model, optimizer=self.optimizer)

    @px.register(px.Dispatch.ONE_TO_ALL)
    def step(self, dies: int = -1) -> float:
        self.optimizer.zero_grad()
        loss = self.model(self.torch.randn(4, 256)).square().mean()
        loss.backward()
        if self.rank == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        self.dist.all_reduce(self.model.weight.grad)
        self.optimizer.step()
        return float(loss.detach())


def lost(group: px.WorkerGroup, rank: int) -> None:
    try:
        group.step(rank)
    except px.WorkerDiedError:
        return
    raise RuntimeError(f"rank {rank} was to die and did not")


def measured(pool: px.ResourcePool, megabytes: float, folder: str) -> dict[str, list[float]]:
    """Return the seconds of each way, by turn; snapshots are seconds of `px.snapshot` after a step."""
    made = Trainer.bind(megabytes)
    group = px.WorkerGroup(pool, made, show_ranks="none")
    found: dict[str, list[float]] = {}
    group.step()
    px.save(group, folder)

    def timed(name: str, act: Callable[[], object]) -> None:
        began = time.perf_counter()
        act()
        found.setdefault(name, []).append(time.perf_counter() - began)

    def anew() -> None:
        nonlocal group
        group.close()
        group = px.WorkerGroup(pool, made, show_ranks="none")

    for turn in range(TURNS):
        ways: dict[str, Callable[[], object]] = {
            "px.replace_ranks": lambda: px.replace_ranks(group),
            "restart() and px.load": lambda: (group.restart(), px.load(group, folder)),
            "a new group and px.load": lambda: (anew(), px.load(group, folder)),
        }
        for name, way in ways.items():
            group.step()
            timed("px.snapshot", lambda: px.snapshot(group))
            lost(group, turn % pool.world_size)
            timed(name, lambda way=way: (way(), group.step()))
    group.close()
    return found


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=64.0)
    given = parser.parse_args()
    px.init(num_cpus=max(4, given.ranks))
    with px.ResourcePool([given.ranks], use_gpu=False) as pool, tempfile.TemporaryDirectory() as folder:
        found = measured(pool, given.megabytes, folder)
    table = Table(
        title=f"{given.ranks} ranks, {given.megabytes:g} MB of weights and twice that of moments on each"
    )
    for column in ("", "median", "lowest", "highest", "against px.replace_ranks"):
        table.add_column(column)
    base = statistics.median(found["px.replace_ranks"])
    for name, seconds in found.items():
        median = statistics.median(seconds)
        texts = [f"{value:.2f} s" for value in (median, min(seconds), max(seconds))]
        table.add_row(name, *texts, "" if name == "px.snapshot" else f"{median / base:.2f}x")
    Console().print(table)
    px.shutdown()


if __name__ == "__main__":
    main()
