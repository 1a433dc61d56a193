"""Torch's own parallelism in groups: the same numbers as one process, and saves of sharded weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx as px
from phalanx.parallel.mlp import LlamaMLP, join_shards
from phalanx.parallel.torch_native import DeviceMeshWorker, parallelize_mlp
from phalanx.weights.local_layout import reshard
from tests.members.killed_trainers import VOCABULARY, Sharded

HIDDEN, INTERMEDIATE = 64, 176

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def local(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copy this rank's shards, because results of torch's collectives may be pending."""
    return {name: tensor.detach().to_local().clone() for name, tensor in tensors.items()}


class MLPWorker(DeviceMeshWorker):
    """An MLP on a torch DeviceMesh of dp 2 x tp 2."""

    def __init__(self) -> None:
        super().__init__()
        self.torch_mesh = self.init_mesh(dp=-1, tp=2)
        torch.manual_seed(0)
        mlp = LlamaMLP(HIDDEN, INTERMEDIATE, init_std=0.1)
        self.layer = parallelize_mlp(mlp.to(self.device), self.torch_mesh["tp"])

    @px.register(px.Dispatch.ONE_TO_ALL)
    def get_weights(self) -> dict[str, torch.Tensor]:
        return local(dict(self.layer.named_parameters()))

    @px.register(px.Dispatch.mesh())
    def run_backward(self, x: torch.Tensor, y_grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.requires_grad_()
        y = self.layer(x)
        y.backward(y_grad)
        gradients = local({name: p.grad for name, p in self.layer.named_parameters()})
        for gradient in gradients.values():
            torch.distributed.all_reduce(gradient, group=self.torch_mesh["dp"].get_group())
        self.gradients = gradients
        return y, x.grad

    @px.register(px.Dispatch.ONE_TO_ALL)
    def get_gradients(self) -> dict[str, torch.Tensor]:
        return self.gradients


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def mlp_group(ray_cluster: None) -> Iterator[px.WorkerGroup]:
    with px.ResourcePool([4], use_gpu=False) as pool, px.WorkerGroup(pool, MLPWorker) as made:
        yield made


def test_the_torch_native_mlp_equals_one_process_forward_and_backward(mlp_group: px.WorkerGroup) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 5, HIDDEN, generator=generator, requires_grad=True)
    y_grad = torch.randn(6, 5, HIDDEN, generator=generator)
    model = LlamaMLP(HIDDEN, INTERMEDIATE)
    model.load_state_dict(join_shards(mlp_group.get_weights()[:2]))
    expected = model(x)
    expected.backward(y_grad)

    y, x_grad = mlp_group.run_backward(x.detach(), y_grad)

    assert mlp_group.mesh() == px.Mesh(dp=2, tp=2)
    assert type(y) is torch.Tensor
    close(y, expected.detach())
    close(x_grad, x.grad)
    close(
        join_shards(mlp_group.get_gradients()[:2]),
        {name: parameter.grad for name, parameter in model.named_parameters()},
    )


def full_weights(worker: Any) -> dict[str, torch.Tensor]:
    reshard(worker.model)
    return {name: one.full_tensor().detach().clone() for name, one in worker.model.named_parameters()}


def test_sharded_weights_can_be_saved_and_loaded_after_a_pass_that_raised(
    here: px.ResourcePool, tmp_path: Path
) -> None:
    with px.WorkerGroup(here[0:1], Sharded) as group:
        weights = group.run(full_weights)
        with pytest.raises(IndexError):
            group.run(lambda worker: worker.train(torch.full((2, 4), VOCABULARY)))
        px.save(group, tmp_path)
        group.step(0)
        px.load(group, tmp_path)

        close(group.run(full_weights), weights)
    torch.distributed.destroy_process_group()  # an inline rank forms it in this process
