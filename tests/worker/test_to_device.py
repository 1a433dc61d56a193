"""Where tensors among the arguments of a ``to_device`` method lie, however they got there.

The device of the ranks is "meta": tensors on it have shape and dtype, and no machine lacks one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import phalanx as px
from phalanx.worker.worker_runtime import WorkerRuntime


@dataclass
class Batch:
    tokens: torch.Tensor
    names: np.ndarray[Any, Any]


class Trainer(px.Worker):
    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def make(self, rows: torch.Tensor) -> Batch:
        return Batch(rows[:, None].repeat(1, 4), np.arange(len(rows)))

    @px.register(px.Dispatch.DP_COMPUTE_METRIC, to_device=True)
    def split(self, batch: Batch) -> tuple[str, tuple[int, ...], bool]:
        return batch.tokens.device.type, tuple(batch.tokens.shape), isinstance(batch.names, np.ndarray)

    @px.register(px.Dispatch.ONE_TO_ALL, to_device=True)
    def whole(self, batch: Batch) -> tuple[str, tuple[int, ...], bool]:
        return batch.tokens.device.type, tuple(batch.tokens.shape), isinstance(batch.names, np.ndarray)

    @px.register(px.Dispatch.DP_COMPUTE_METRIC, to_device=True, readonly=True)
    def look(self, batch: Batch) -> str:
        return batch.tokens.device.type

    @px.register(px.Dispatch.DP_COMPUTE_METRIC)
    def stay(self, batch: Batch) -> str:
        return batch.tokens.device.type


ROWS = torch.arange(6, dtype=torch.float32)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[px.WorkerGroup]:
    monkeypatch.setattr(WorkerRuntime, "device", torch.device("meta"))
    with px.ResourcePool([2], use_gpu=False, backend="inline") as pool, px.WorkerGroup(pool, Trainer) as made:
        yield made


@pytest.fixture
def fewer(group: px.WorkerGroup) -> Iterator[px.WorkerGroup]:
    """A group of one rank, which gets rows of several."""
    with px.ResourcePool([1], use_gpu=False, backend="inline") as pool, px.WorkerGroup(pool, Trainer) as made:
        yield made


def batch() -> Batch:
    return Batch(ROWS[:, None].repeat(1, 4), np.arange(6))


def test_rows_of_a_value(group: px.WorkerGroup) -> None:
    assert group.split(batch()) == [("meta", (3, 4), True)] * 2


def test_rows_of_a_future(group: px.WorkerGroup) -> None:
    assert group.split(group.make.submit(ROWS)) == [("meta", (3, 4), True)] * 2


def test_rows_of_a_future_from_several_ranks(group: px.WorkerGroup, fewer: px.WorkerGroup) -> None:
    assert fewer.split(group.make.submit(ROWS)) == [("meta", (6, 4), True)]


def test_a_whole_future(group: px.WorkerGroup) -> None:
    assert group.whole(group.make.submit(ROWS)) == [("meta", (6, 4), True)] * 2


def test_a_value_that_was_put(group: px.WorkerGroup) -> None:
    assert group.whole(px.put(batch(), backend="inline")) == [("meta", (6, 4), True)] * 2


def test_rows_for_reading_only(group: px.WorkerGroup) -> None:
    assert group.look(group.make.submit(ROWS)) == ["meta"] * 2


def test_without_to_device_a_future_stays_on_the_cpu(group: px.WorkerGroup) -> None:
    assert group.stay(group.make.submit(ROWS)) == ["cpu"] * 2
