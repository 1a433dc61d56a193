"""Megatron behind a mesh-aware call: forward and backward equal one process, in any layout of the ranks.

A rank that is killed in a step and replaced changes no loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import phalanx as px
from phalanx.parallel.megatron import MegatronWorker, MegatronWorkerGroup, ParallelLlamaMLP, parallel_state
from phalanx.parallel.mlp import LlamaMLP, join_shards
from tests.members.killed_trainers import Fragile

HIDDEN, INTERMEDIATE = 256, 704
X_SHAPE = (8, 4, HIDDEN)  # sequence, batch, hidden


class MLPWorker(MegatronWorker):
    """One MLP per pipeline stage; ``form`` changes the layout of the ranks."""

    @px.register(px.Dispatch.ONE_TO_ALL)
    def form(self, tp: int, pp: int) -> None:
        if hasattr(self, "layer"):
            self.leave_model_parallel()
        device = self.init_model_parallel(tp=tp, pp=pp)
        stage = parallel_state().get_pipeline_model_parallel_rank()
        torch.manual_seed(stage)
        config = self.model_parallel_config()
        self.layer = ParallelLlamaMLP(HIDDEN, INTERMEDIATE, config, init_std=0.05).to(device)

    @px.register(px.Dispatch.ONE_TO_ALL)
    def get_weights(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.layer.named_parameters())

    @px.register(px.Dispatch.ONE_TO_ALL)
    def get_gradients(self) -> dict[str, Any]:
        return {name: parameter.grad for name, parameter in self.layer.named_parameters()}

    @px.register(px.Dispatch.MEGATRON_COMPUTE)
    def run_backward(self, x: torch.Tensor, y_grad: torch.Tensor) -> Any:
        """Sum gradients over dp. Return y and, without pipeline stages, the gradient of x."""
        x = x.to(self.device).requires_grad_()
        self.layer.zero_grad()
        if parallel_state().get_pipeline_model_parallel_world_size() == 1:
            y = self.layer(x)
            y.backward(y_grad.to(self.device))
        else:
            y = self._run_stages(x, y_grad.to(self.device))
        for parameter in self.layer.parameters():
            torch.distributed.all_reduce(parameter.grad, group=parallel_state().get_data_parallel_group())
        return y, x.grad

    def _run_stages(self, x: torch.Tensor, y_grad: torch.Tensor) -> torch.Tensor | None:
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        group = parallel_state().get_pipeline_model_parallel_group()
        index, count = group.rank(), group.size()
        stage = PipelineStage(self.layer, index, count, self.device, group=group)
        schedule = ScheduleGPipe(stage, 2, lambda y, grad: (y * grad).sum(), scale_grads=False)
        if index == 0:
            return schedule.step(x.detach())
        return schedule.step(target=y_grad)


@pytest.fixture(scope="module")
def group(ray_cluster: None) -> Iterator[MegatronWorkerGroup]:
    with px.ResourcePool([4], use_gpu=False) as pool, MegatronWorkerGroup(pool, MLPWorker) as made:
        yield made


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra phalanx[megatron] (Linux)"),
]


def stage_weights(group: MegatronWorkerGroup, what: str) -> list[dict[str, torch.Tensor]]:
    """Return the full weights (or gradients) of each pipeline stage, joined from dp 0."""
    by_rank, mesh = group.call(what), group.mesh()
    return [
        join_shards([by_rank[rank] for rank in mesh.ranks(pp=stage, dp=0, cp=0)])
        for stage in range(mesh.size("pp"))
    ]


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tp", "pp"), [(4, 1), (2, 1), (2, 2)])
def test_forward_and_backward_equal_one_process(group: MegatronWorkerGroup, tp: int, pp: int) -> None:
    group.form(tp, pp)
    group.refresh_mesh()
    generator = torch.Generator().manual_seed(1)
    x = [
        torch.randn(X_SHAPE, generator=generator, requires_grad=True) for _ in range(group.mesh().size("dp"))
    ]
    y_grad = [torch.randn(X_SHAPE, generator=generator) for _ in x]
    weights = stage_weights(group, "get_weights")
    model = torch.nn.Sequential(*(LlamaMLP(HIDDEN, INTERMEDIATE) for _ in weights))
    for layer, its_weights in zip(model, weights, strict=True):
        layer.load_state_dict(its_weights)
    expected = [model(one) for one in x]
    torch.autograd.backward(expected, y_grad)

    outputs = group.run_backward([one.detach() for one in x], y_grad)

    close([y for y, _ in outputs], [y.detach() for y in expected])
    if group.mesh().size("pp") == 1:
        close([x_grad for _, x_grad in outputs], [one.grad for one in x])
    for layer, gradients in zip(model, stage_weights(group, "get_gradients"), strict=True):
        close(gradients, {name: parameter.grad for name, parameter in layer.named_parameters()})


def test_a_tp_size_that_does_not_divide_the_ranks_is_refused(group: MegatronWorkerGroup) -> None:
    with pytest.raises(px.RemoteCallError, match=r"tp=3.*4 ranks.*must divide"):
        group.form(3, 1)


WIDTH, STEPS, AT = 32, 4, 2


class Trainer(Fragile, MegatronWorker):
    """Two layers sharded over tp, with gradients summed over dp."""

    def __init__(self, tp: int) -> None:
        device = self.init_model_parallel(tp=tp)
        config = self.model_parallel_config()
        self.model = torch.nn.Sequential(
            *(ParallelLlamaMLP(WIDTH, 2 * WIDTH, config, init_std=0.2) for _ in range(2))
        ).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        px.register_state(self, model=self.model, optimizer=self.optimizer)
        torch.manual_seed(parallel_state().get_data_parallel_rank())

    def rejoin(self) -> None:
        before = torch.get_rng_state()
        super().rejoin()
        assert torch.equal(torch.get_rng_state(), before)

    def train(self, ids: torch.Tensor) -> float:
        loss = self.model(torch.randn(4, 2, WIDTH)).square().mean()
        loss.backward()
        for parameter in self.model.parameters():
            torch.distributed.all_reduce(parameter.grad, group=parallel_state().get_data_parallel_group())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class Critic(MegatronWorker):
    """A layer on the parallel state that another role has formed."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ParallelLlamaMLP(WIDTH, WIDTH, self.model_parallel_config())
        px.register_state(self, model=self.model)

    @px.register(px.Dispatch.ONE_TO_ALL)
    def score(self) -> float:
        return self.model(torch.ones(1, 1, WIDTH)).sum().item()


@pytest.mark.parametrize("tp", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_a_step_with_a_killed_rank_is_repeated_with_the_same_losses(ray_cluster: None, tp: int) -> None:
    roles = px.colocate({"first": px.Worker, "actor": Trainer.bind(tp), "critic": Critic})
    with px.ResourcePool([2], use_gpu=False) as two, MegatronWorkerGroup(two, roles) as process:
        group, score = process.actor, process.critic.score()
        before = group.pid()
        for step in range(AT):
            group.step(step)
        px.snapshot(process)
        went_on = [group.step(step) for step in range(STEPS)]
        px.restore(process)
        group.arm(1, went_on[0][1][1] // 2)
        with pytest.raises(px.WorkerDiedError):
            group.step(0)

        assert px.replace_ranks(process) == (1,)

        assert process.critic.score() == score
        assert [group.step(step) for step in range(STEPS)] == went_on
        assert [one == other for one, other in zip(before, group.pid(), strict=True)] == [True, False]
        assert group.mesh().size("tp") == tp
