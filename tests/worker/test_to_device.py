"""Devices of tensors among the arguments of ``to_device`` methods.

The device of the ranks is "meta": its tensors have shape and dtype, and every machine has it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import phalanx as px
from phalanx.worker.worker_runtime import WorkerRuntime

Batch = dict[str, Any]


class Trainer(px.Worker):
    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def make(self, rows: torch.Tensor) -> Batch:
        return batch(rows)

    @px.register(px.Dispatch.DP_COMPUTE_METRIC, to_device=True)
    def split(self, batch: Batch) -> tuple[str, tuple[int, ...], bool]:
        tokens = batch["tokens"]
        return tokens.device.type, tuple(tokens.shape), isinstance(batch["names"], np.ndarray)

    @px.register(px.Dispatch.ONE_TO_ALL, to_device=True)
    def whole(self, batch: Batch) -> tuple[str, tuple[int, ...], bool]:
        return self.split(batch)

    @px.register(px.Dispatch.DP_COMPUTE_METRIC, to_device=True, readonly=True)
    def look(self, batch: Batch) -> str:
        return batch["tokens"].device.type

    @px.register(px.Dispatch.DP_COMPUTE_METRIC)
    def stay(self, batch: Batch) -> str:
        return batch["tokens"].device.type


ROWS = torch.arange(6, dtype=torch.float32)


def batch(rows: torch.Tensor = ROWS) -> Batch:
    return {"tokens": rows[:, None].repeat(1, 4), "names": np.arange(len(rows))}


def test_tensors_are_on_the_device_of_the_rank_only_with_to_device(
    here: px.ResourcePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerRuntime, "device", torch.device("meta"))
    group, fewer = px.WorkerGroup(here[0:2], Trainer), px.WorkerGroup(here[2:3], Trainer)
    for rows in (batch(), group.make.submit(ROWS)):
        assert group.split(rows) == [("meta", (3, 4), True)] * 2
    for whole in (px.put(batch(), backend="inline"), group.make.submit(ROWS)):
        assert group.whole(whole) == [("meta", (6, 4), True)] * 2
    assert group.whole({"tokens": torch.empty(0, 4), "names": None}) == [("meta", (0, 4), False)] * 2
    made = group.make.submit(ROWS)
    assert fewer.split(made) == [("meta", (6, 4), True)]  # joined from several ranks
    assert group.look(made) == ["meta"] * 2  # for reading only
    assert group.stay(made) == ["cpu"] * 2
