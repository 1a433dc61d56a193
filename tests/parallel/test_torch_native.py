"""Torch's own parallelism in groups: the same numbers as one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import phalanx as px
from phalanx.parallel.mlp import LlamaMLP, join_shards
from phalanx.parallel.torch_native import DeviceMeshWorker, FSDPTrainer, parallelize_mlp
from tests.members.killed_trainers import VOCABULARY, tiny_llama

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
        mlp = LlamaMLP(HIDDEN, INTERMEDIATE, init_std=0.1, device=self.device)
        self.layer = parallelize_mlp(mlp, self.torch_mesh["tp"])

    @px.register(px.Dispatch.ONE_TO_ALL)
    def get_weights(self) -> dict[str, torch.Tensor]:
        return local(dict(self.layer.named_parameters()))

    @px.register(px.Dispatch.mesh())
    def run_layer(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

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


class OneProcess:
    """The reference: the same steps with nothing but torch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = tiny_llama()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def backward(self, ids: torch.Tensor) -> float:
        logits = self.model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        return loss.item()

    def train_step(self, ids: torch.Tensor) -> float:
        loss = self.backward(ids)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}


def tiny_gpt2() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=2))


def batch(rows: int, seed: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, 12), generator=torch.Generator().manual_seed(seed))


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
    assert type(mlp_group.run_layer(x.detach())) is torch.Tensor
    close(y, expected.detach())
    close(x_grad, x.grad)
    close(
        join_shards(mlp_group.get_gradients()[:2]),
        {name: parameter.grad for name, parameter in model.named_parameters()},
    )


@pytest.fixture(scope="module")
def trainers(ray_cluster: None) -> Iterator[px.WorkerGroup]:
    with (
        px.ResourcePool([2], use_gpu=False) as pool,
        px.WorkerGroup(pool, FSDPTrainer.bind(tiny_llama)) as made,
    ):
        px.snapshot(made)
        yield made


@pytest.fixture
def begun(trainers: px.WorkerGroup) -> px.WorkerGroup:
    """The trainers in their initial state."""
    px.restore(trainers)
    return trainers


def gradients(worker: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    half = ids.chunk(worker.world_size)[worker.rank]
    worker.accumulate(half)
    full = {name: p.grad.full_tensor() for name, p in worker.model.named_parameters()}
    worker.optimizer.zero_grad()
    return full


def test_fsdp_forward_and_gradients_equal_one_process(begun: px.WorkerGroup) -> None:
    ids, reference = batch(5, seed=1), OneProcess()
    with torch.no_grad():
        close(begun.logits(ids), reference.model(input_ids=ids).logits)
    ids = batch(4, seed=2)
    reference.backward(ids)
    expected = {name: p.grad for name, p in reference.model.named_parameters()}
    for by_rank in begun.run(gradients, ids):
        close(by_rank, expected)


@pytest.mark.parametrize("rows", [4, 5, 1], ids=["even", "uneven", "fewer rows than ranks"])
def test_fsdp_steps_equal_one_process(begun: px.WorkerGroup, rows: int) -> None:
    batches, reference = [batch(rows, seed) for seed in range(5)], OneProcess()
    expected = [reference.train_step(ids) for ids in batches]
    losses = [begun.train_step(ids)["loss"] for ids in batches]
    close(losses, expected)
    begun.logits(batches[0])  # after it, FSDP leaves parameters gathered
    close(begun.weights()[0], reference.weights())


def test_weights_can_be_saved_and_loaded_after_a_pass_that_raised(tmp_path: Path) -> None:
    with (
        px.ResourcePool([1], use_gpu=False, backend="inline") as pool,
        px.WorkerGroup(pool, FSDPTrainer.bind(tiny_llama)) as group,
    ):
        weights = group.weights()[0]
        with pytest.raises(IndexError):
            group.train_step(torch.full((2, 4), VOCABULARY))
        px.save(group, tmp_path)
        group.train_step(batch(2, seed=1))
        px.load(group, tmp_path)

        close(group.weights()[0], weights)


def break_backward(worker: Any) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError("in backward")

    worker.model.get_decoder().layers[0].mlp.register_full_backward_hook(fail)


def test_a_step_whose_backward_pass_raised_does_not_change_later_steps() -> None:
    reference = OneProcess()
    with (
        px.ResourcePool([1], use_gpu=False, backend="inline") as pool,
        px.WorkerGroup(pool, FSDPTrainer.bind(tiny_llama)) as group,
    ):
        close(group.train_step(batch(2, seed=1))["loss"], reference.train_step(batch(2, seed=1)))
        group.run(break_backward)
        with pytest.raises(ArithmeticError):
            group.train_step(batch(2, seed=2))
        for seed in (3, 4):
            close(group.train_step(batch(2, seed))["loss"], reference.train_step(batch(2, seed)))
        close(group.weights()[0], reference.weights())


def test_each_layer_of_a_model_with_other_names_of_layers_is_sharded() -> None:
    with (
        px.ResourcePool([1], use_gpu=False, backend="inline") as pool,
        px.WorkerGroup(pool, FSDPTrainer.bind(tiny_gpt2)) as group,
    ):
        sharded = group.run(lambda worker: [isinstance(x, FSDPModule) for x in worker.model.transformer.h])
        assert sharded == [[True, True]]
        first, *_, last = (group.train_step(batch(2, seed=1))["loss"] for _ in range(4))

        assert last < first


def test_each_rank_holds_its_own_shard_and_rows_without_a_next_token_are_refused(
    begun: px.WorkerGroup,
) -> None:
    begun.logits(batch(2, seed=1))
    numbers = [sum(shard.numel() for shard in shards.values()) for shards in begun.shards()]
    total = sum(parameter.numel() for parameter in tiny_llama().parameters())
    assert sum(numbers) == total
    assert max(numbers) < 0.6 * total
    with pytest.raises(ValueError, match="no row of any rank has a next token"):
        begun.train_step(torch.zeros(2, 1, dtype=torch.long))
