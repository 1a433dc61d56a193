"""A step that an earlier version wrote (format 1) is loaded, also into another layout."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx as px

DATA = Path(__file__).with_name("data") / "format_1.tar.xz"


class Policy(px.Worker):
    """Has its rows of a matrix, a bias, Adam, and counts that differ by rank."""

    def __init__(self) -> None:
        share = 8 // self.world_size
        rows = torch.nn.Parameter(torch.zeros(share, 3))
        self.model = torch.nn.ParameterDict({"w": rows, "b": torch.nn.Parameter(torch.zeros(2))})
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.5)
        self.counts: dict[Any, Any] = {"steps": 0}
        boxes = {"w": px.weights.ShardSpec((8, 3), (((self.rank * share, 0), (share, 3)),))}
        px.register_state(
            self, model=self.model, optimizer=self.optimizer, counts=self.counts, boxes=boxes, rng=False
        )

    @px.register
    def get(self) -> tuple[torch.Tensor, torch.Tensor, float, dict[Any, Any]]:
        moments = self.optimizer.state[self.model["w"]]["exp_avg"]
        return self.model["w"].detach(), moments, self.optimizer.param_groups[0]["lr"], self.counts


@pytest.fixture
def path(tmp_path: Path) -> str:
    with tarfile.open(DATA) as archive:
        archive.extractall(tmp_path / "run", filter="data")
    return str(tmp_path / "run")


def test_a_run_resumes_from_a_step_of_format_1(
    here: px.ResourcePool, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    state, staleness = {"seen": 0}, px.StalenessManager(max_lag=1, rows_per_version=1, backend="inline")
    group = px.WorkerGroup(here[0:2], Policy, name="policy")
    with (
        px.Channel(name="rows", backend="inline") as channel,
        px.checkpoint.CheckpointManager(
            path, {"policy": group}, state=state, channels=[channel], staleness=staleness
        ) as run,
    ):
        assert run.resume() == 2
        assert "channels and staleness are not restored" in caplog.text
        run.save(3)
        assert run.resume() == 3

    weights, moments, rates, counts = zip(*group.get(), strict=True)
    full = torch.arange(24.0).view(8, 3)
    assert torch.allclose(torch.cat(moments), full * 0.1)
    assert torch.allclose(torch.cat(weights), torch.where(full > 0, full - 0.1, full))
    assert rates == (0.1, 0.1)
    assert [(one["steps"], one["by"], one[7].tolist()) for one in counts] == [
        (3, 0, [0.0, 0.0]),
        (3, 1, [1.0, 1.0]),
    ]
    assert counts[0]["moments"][0].tolist() == [1.0, 1.0]
    assert counts[0]["moments"][1] == {"x": 1}
    assert state == {"seen": 7}


def test_values_by_rank_of_format_1_are_refused_on_another_number_of_ranks(
    here: px.ResourcePool, path: str
) -> None:
    alone = px.WorkerGroup(here[0:1], Policy, name="policy")

    with pytest.raises(px.checkpoint.CheckpointMismatch, match=r"counts\.by.*parts=\['model', 'optimizer'\]"):
        px.load(alone, path)

    px.load(alone, path, parts=["model", "optimizer"])
    _, moments, _, counts = alone.get()[0]
    assert torch.allclose(moments, torch.arange(24.0).view(8, 3) * 0.1)
    assert counts == {"steps": 0}  # not one of the loaded parts
