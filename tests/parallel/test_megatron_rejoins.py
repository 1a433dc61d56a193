"""A rank of a Megatron group is killed in a step and replaced: the losses are those of a run without a fault."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

import phalanx as px
from phalanx.parallel.megatron import MegatronWorker, MegatronWorkerGroup, ParallelLlamaMLP, parallel_state
from tests.members.killed_trainers import Fragile

HIDDEN, STEPS, AT = 32, 4, 2
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra phalanx[megatron] (Linux)"),
]


class Trainer(Fragile, MegatronWorker):
    """Two layers sharded over tp, with gradients summed over dp."""

    def __init__(self, tp: int) -> None:
        device = self.init_model_parallel(tp=tp)
        config = self.model_parallel_config()
        self.model = torch.nn.Sequential(
            *(ParallelLlamaMLP(HIDDEN, 2 * HIDDEN, config, init_std=0.2) for _ in range(2))
        ).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        px.register_state(self, model=self.model, optimizer=self.optimizer)
        torch.manual_seed(parallel_state().get_data_parallel_rank())

    def train(self, ids: torch.Tensor) -> float:
        loss = self.model(torch.randn(4, 2, HIDDEN)).square().mean()
        loss.backward()
        for parameter in self.model.parameters():
            torch.distributed.all_reduce(parameter.grad, group=parallel_state().get_data_parallel_group())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


@pytest.fixture(scope="module")
def two(ray_cluster: None) -> Iterator[px.ResourcePool]:
    with px.ResourcePool([2], use_gpu=False, backend="ray") as pool:
        yield pool


@pytest.mark.parametrize("tp", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_a_step_with_a_killed_rank_is_repeated_with_the_same_losses(two: px.ResourcePool, tp: int) -> None:
    with MegatronWorkerGroup(two, Trainer.bind(tp)) as group:
        before = group.pid()
        for step in range(AT):
            group.step(step)
        px.snapshot(group)
        went_on = [group.step(step) for step in range(STEPS)]
        px.restore(group)
        group.arm(1, went_on[0][1][1] // 2)
        with pytest.raises(px.WorkerDiedError):
            group.step(0)

        assert px.replace_ranks(group) == (1,)

        assert [group.step(step) for step in range(STEPS)] == went_on
        assert [one == other for one, other in zip(before, group.pid(), strict=True)] == [True, False]
        assert group.mesh().size("tp") == tp
