"""Models and optimizers that differ from rank to rank: what does not fit is named before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import phalanx as px


class Apart(px.Worker):
    """Only rank 0 makes steps, so that the optimizer of the other has no state."""

    def __init__(self, width: int = 4) -> None:
        torch.manual_seed(0)
        self.width = width
        self.model = torch.nn.Linear(width, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        px.register_state(self, model=self.model, optimizer=self.optimizer)

    @px.register(px.Dispatch.RANK_ZERO)
    def step(self) -> None:
        self.model(torch.ones(2, self.width)).sum().backward()
        self.optimizer.step()

    @px.register
    def held(self) -> tuple[list[float], int]:
        return self.model.weight.flatten().tolist(), len(self.optimizer.state_dict()["state"].get(0, {}))


@pytest.fixture
def pool() -> px.ResourcePool:
    return px.ResourcePool([2], backend="inline")


def test_an_optimizer_that_only_some_ranks_stepped_is_refused_before_anything_is_loaded(
    pool: px.ResourcePool, tmp_path: Path
) -> None:
    group = px.WorkerGroup(pool, Apart)
    group.step()
    px.save(group, str(tmp_path))
    group.step()
    before = group.held()

    with pytest.raises(px.checkpoint.CheckpointMismatch, match="others had made no step; step on all ranks"):
        px.load(group, str(tmp_path))

    assert group.held() == before


def test_a_model_of_another_shape_is_refused_before_any_of_it_is_loaded(
    pool: px.ResourcePool, tmp_path: Path
) -> None:
    group = px.WorkerGroup(pool, Apart)
    group.step()
    px.save(group, str(tmp_path))
    wide = px.WorkerGroup(pool, Apart.bind(width=5))
    before = wide.held()

    with pytest.raises(
        px.checkpoint.CheckpointMismatch,
        match=r"model.weight has shape \[1, 4\] where it was saved, and \[1, 5\] here",
    ):
        px.load(wide, str(tmp_path), parts=["model"])

    assert wide.held() == before
