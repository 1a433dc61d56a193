"""A driver that trains two ranks on noise of their own generators, saves each step, and prints its rewards."""

from __future__ import annotations

import os
import sys

import torch

import phalanx as px
from tests.checkpoint.save_workers import Trainer
from tests.support.scripts import tell

STEPS = 12
WIDTH = 100_000  # of a layer, so that a kill may hit a write


def main(address: str, path: str) -> None:
    """Print the pids of the ranks, then the rewards of all steps after each step, from the last complete one on."""
    px.init(backend="ray", address=address, log_to_driver=False)
    state = {"scale": torch.Generator().manual_seed(3), "rewards": []}
    with px.ResourcePool([2], use_gpu=False, name_prefix=f"driver-{os.getpid()}") as pool:
        actor = px.WorkerGroup(pool, Trainer.bind(width=WIDTH, alike=False))
        with px.checkpoint.CheckpointManager(path, {"actor": actor}, state=state, keep=2) as run:
            first = (run.resume() or 0) + 1
            tell({"ranks": actor.run(lambda _: os.getpid())})
            for step in range(first, STEPS + 1):
                scale = torch.rand(1, generator=state["scale"]).item()
                state["rewards"].append([scale * loss for loss in actor.step()])
                tell({"rewards": state["rewards"]})
                if step % 2:
                    run.save(step)
                else:
                    run.save.submit(step)
    tell({"over": True})


if __name__ == "__main__":
    main(*sys.argv[1:])
