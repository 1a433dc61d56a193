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
    return px.ResourcePool([2], use_gpu=False, backend="inline")


@pytest.mark.parametrize(
    ("width", "parts", "why"),
    [
        (4, None, "others had made no step; step on all ranks"),
        (5, ["model"], r"model.weight has shape \[1, 4\] where it was saved, and \[1, 5\] here"),
    ],
    ids=["an optimizer that only some ranks stepped", "a model of another shape"],
)
def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    pool: px.ResourcePool, tmp_path: Path, width: int, parts: list[str] | None, why: str
) -> None:
    group, other = px.WorkerGroup(pool, Apart), px.WorkerGroup(pool, Apart.bind(width=width))
    group.step()
    px.save(group, str(tmp_path))
    other.step()
    before = other.held()

    with pytest.raises(px.checkpoint.CheckpointMismatch, match=why):
        px.load(other, str(tmp_path), parts=parts)

    assert other.held() == before


class Uneven(px.Worker):
    """Rank 0 has all rows of a matrix and the other rank none, as under FSDP; a second tensor has no elements."""

    def __init__(self, fill: float = 1.0) -> None:
        share = (2, 0)[self.rank] if self.world_size > 1 else 2
        self.rows = torch.nn.Parameter(torch.full((share, 3), fill))
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))
        self.optimizer = torch.optim.Adam([self.rows, self.empty], lr=0.1)
        boxes = {
            "rows": px.weights.ShardSpec((2, 3), (((0, 0), (2, 3)),) if share else ()),
            "empty": px.weights.ShardSpec((0, 3), ()),
        }
        model = {"rows": self.rows, "empty": self.empty}
        px.register_state(self, model=model, optimizer=self.optimizer, boxes=boxes, rng=False)

    @px.register
    def step(self) -> None:
        for parameter in (self.rows, self.empty):
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    @px.register
    def held(self) -> list[torch.Tensor]:
        return [self.rows.detach(), self.optimizer.state[self.rows]["exp_avg"]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_without_a_box_are_saved_and_loaded(pool: px.ResourcePool, tmp_path: Path, ranks: int) -> None:
    group = px.WorkerGroup(pool, Uneven)
    group.step()
    px.save(group, tmp_path)
    wanted = group.held()[0]

    fresh = px.WorkerGroup(px.ResourcePool([ranks], use_gpu=False, backend="inline"), Uneven.bind(fill=0.0))
    px.load(fresh, tmp_path)

    assert all(torch.equal(*pair) for pair in zip(fresh.held()[0], wanted, strict=True))
