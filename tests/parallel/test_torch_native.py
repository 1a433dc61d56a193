"""Torch's own parallelism in groups: calls over a device mesh, and saves of sharded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx as px
from phalanx.parallel.torch_native import DeviceMeshWorker
from phalanx.weights.local_layout import reshard
from tests.members.killed_trainers import VOCABULARY, Sharded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Summing(DeviceMeshWorker):
    def __init__(self) -> None:
        self.torch_mesh = self.init_mesh(dp=-1, tp=2)

    @px.register(px.Dispatch.mesh())
    def sum_over_tp(self, x: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(x, group=self.torch_mesh["tp"].get_group())
        return x


def test_a_call_over_a_device_mesh_splits_rows_over_dp(ray_cluster: None) -> None:
    with px.ResourcePool([4], use_gpu=False) as pool, px.WorkerGroup(pool, Summing) as group:
        assert group.sum_over_tp(torch.arange(4)).tolist() == [0, 2, 4, 6]
        assert group.mesh() == px.Mesh(dp=2, tp=2)


def full_weights(worker: Any) -> dict[str, torch.Tensor]:
    reshard(worker.model)
    return {name: one.full_tensor().detach().clone() for name, one in worker.model.named_parameters()}


def test_sharded_weights_are_saved_after_a_failed_pass(here: px.ResourcePool, tmp_path: Path) -> None:
    with px.WorkerGroup(here[0:1], Sharded) as group:
        weights = group.run(full_weights)
        with pytest.raises(IndexError):
            group.run(lambda worker: worker.train(torch.full((2, 4), VOCABULARY)))
        px.save(group, tmp_path)
        group.step(0)
        px.load(group, tmp_path)

        torch.testing.assert_close(group.run(full_weights), weights)
    torch.distributed.destroy_process_group()  # an inline rank forms it in this process
