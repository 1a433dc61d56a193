"""Workers whose state is saved, and helpers that write steps of one file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import phalanx as px
from phalanx.checkpoint.steps import Step, StepWriter


@contextmanager
def writing(path: Path | str, step: Any, keep: Any = None) -> Iterator[StepWriter]:
    """Open a step, and abandon it in the end unless it was committed."""
    writer = StepWriter(str(path), step, keep)
    try:
        yield writer
    finally:
        writer.abandon()


def saved(path: Path | str, step: Any, *, keep: Any = None, data: bytes = b"weights") -> Step:
    """Commit a step with one file."""
    with writing(path, step, keep) as writer:
        writer.write("policy/rank-0", data)
        return writer.commit()


class Trainer(px.Worker):
    """Trains a small network with noise from the generators, which are ``alike`` on all ranks or not."""

    def __init__(self, seed: int = 0, rng: bool = True, width: int = 10, alike: bool = True) -> None:
        torch.manual_seed(seed if alike else seed + self.rank)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Linear(width, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        px.register_state(self, **parts, rng=rng)

    @px.register
    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(4, 6)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    @px.register
    def values(self) -> dict[str, torch.Tensor]:
        found = {name: one.detach().clone() for name, one in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for leaf, one in self.optimizer.state[parameter].items():
                found[f"{name}.{leaf}"] = one.clone()
        return found


class Bag(px.Worker):
    """Keeps the values that it is given."""

    def __init__(self, **held: Any) -> None:
        self.held: dict[str, Any] = dict(held)

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state

    @px.register(px.Dispatch.ALL_TO_ALL)
    def put(self, held: dict[str, Any]) -> None:
        self.held = held

    @px.register
    def get(self) -> dict[str, Any]:
        return self.held


class Nothing(px.Worker):
    """Has no state."""


class Unchanged(px.Worker):
    """Declares that it has no state."""

    def __init__(self) -> None:
        px.register_state(self, rng=False)


class Rows(px.Worker):
    """Has its rows of a matrix, and declares their boxes."""

    def __init__(self, rows: int = 8, fill: float | None = None) -> None:
        share = rows // self.world_size
        first = self.rank * share
        full = torch.arange(rows * 3.0).view(rows, 3)
        self.part = full[first : first + share].clone() if fill is None else torch.full((share, 3), fill)
        boxes = {"w": px.weights.ShardSpec((rows, 3), (((first, 0), (share, 3)),))}
        px.register_state(self, model={"w": self.part}, boxes=boxes, rng=False)

    @px.register
    def get(self) -> torch.Tensor:
        return self.part
