"""A sharded model that keeps its tensors in a new process group trains with the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import phalanx as px
from phalanx.parallel.megatron import replace_groups
from phalanx.parallel.module_rejoining import declare_instead, keep_tensors
from phalanx.weights.local_layout import reshard


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8, bias=False)
        self.tied = torch.nn.Linear(8, 8, bias=False)
        self.tied.weight = self.first.weight
        self.last = torch.nn.Linear(8, 3)
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.tied(torch.relu(self.first(x))) * self.scale)


@pytest.fixture
def world() -> Iterator[None]:
    _join()
    yield
    dist.destroy_process_group()


def _join() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _sharded(model: torch.nn.Module) -> Any:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def _made(build: Callable[[], torch.nn.Module]) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = _sharded(build())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _steps(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses: list[float] = []
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _local(model: Any) -> dict[str, int]:
    return {name: one.to_local().data_ptr() for name, one in model.named_parameters()}


def _goes_on(
    build: Callable[[], torch.nn.Module], fail: Callable[[Any], object], join: Callable[[], None]
) -> tuple[Any, Any]:
    """Assert that a failure and a new process group after 3 of 6 steps change no loss. Return both models."""
    expected = _steps(*_made(build), range(6))
    model, optimizer = _made(build)
    losses = _steps(model.eval(), optimizer, range(3))
    fail(model)
    dist.destroy_process_group()
    join()
    with torch.device("meta"):
        again = build()
    again = _sharded(again)
    keep_tensors(again, model, optimizer)

    assert list(_local(again)) == list(_local(model))  # tied parameters count once
    assert not again.training
    assert losses + _steps(again, optimizer, range(3, 6)) == expected
    assert optimizer.param_groups[0]["params"] == list(again.parameters())
    return model, again


def _half_a_step(model: Any) -> None:
    model(torch.ones(4, 8)).sum().backward()


def _fail(*_: Any) -> None:
    raise RuntimeError("a peer was lost")


def _cut_off(model: Any) -> None:
    """Fail in the middle of a forward pass, where FSDP has gathered its parameters."""
    handle = model.register_forward_hook(_fail, prepend=True)
    with pytest.raises(RuntimeError, match="a peer was lost"):
        model(torch.ones(4, 8))
    handle.remove()


def _cut_off_backward(model: Any) -> None:
    handle = model.tied.register_full_backward_hook(_fail)
    with pytest.raises(RuntimeError, match="a peer was lost"):
        _half_a_step(model)
    handle.remove()


@pytest.mark.parametrize("fail", [_half_a_step, _cut_off_backward])
def test_a_model_that_is_sharded_again_continues_with_the_same_numbers_and_memory(
    world: None, fail: Callable[[Any], object]
) -> None:
    model, again = _goes_on(Net, fail, _join)

    assert _local(again) == _local(model)


class Adapted(Net):
    """Saves less than it has, as a model with adapters does."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {}


def test_reshard_shards_parameters_after_failed_and_finished_passes(world: None) -> None:
    model = _sharded(Adapted())
    _cut_off(model)
    reshard(model)
    assert all(isinstance(one, DTensor) for one in model.parameters())
    with torch.no_grad():
        model(torch.ones(4, 8))
    reshard(model)
    assert all(isinstance(one, DTensor) for one in model.parameters())


def _uneven_rank(rank: int, folder: str) -> None:
    """A model of 5 rows on 2 ranks."""
    stores = (dist.FileStore(f"{folder}/{name}", 2) for name in ("first", "second"))

    def join() -> None:
        dist.init_process_group("gloo", store=next(stores), rank=rank, world_size=2)

    join()
    _goes_on(lambda: torch.nn.Linear(8, 5), _cut_off, join)
    dist.destroy_process_group()


@pytest.mark.slow
def test_uneven_shards_of_two_ranks_continue_with_the_same_numbers(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_uneven_rank, (str(tmp_path),), nprocs=2)


def test_frozen_parameters_stay_frozen_in_a_new_model() -> None:
    made = torch.nn.Linear(2, 2, device="meta")
    keep_tensors(made, torch.nn.Linear(2, 2).requires_grad_(False))

    assert not any(one.requires_grad for one in made.parameters())


def test_process_groups_in_modules_are_replaced_and_tensors_of_another_model_are_refused(world: None) -> None:
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2))
    old, new, own = (dist.new_group([0], group_desc=use) for use in ("tp", "tp", None))
    model[0].tp_group, model[0].own_group = old, own
    model[0].pg_collection = SimpleNamespace(tp=old)

    replace_groups([model], type("State", (), {"tp_group": new, "size": 1}))

    assert (model[0].tp_group, model[0].own_group, model[0].pg_collection.tp) == (new, own, new)
    with pytest.raises(px.DeclarationError, match=r"keep_tensors: 1\.weight, first\.weight"):
        keep_tensors(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 2, bias=False)), Net())


class Declared(px.Worker):
    """Declares a model in all ways, and then another model in its place."""

    def __init__(self, fill: float) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))
        self.counts = {"steps": 0}
        px.register_state(self, layer=self.model[0], counts=self.counts)
        self.publish_weights("out", self.model[0])
        self.accept_weights("in", self.model)
        made = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))
        torch.nn.init.constant_(made[0].weight, fill)
        declare_instead(self, self.model, made)
        self.model = made

    @px.register(px.Dispatch.ONE_TO_ALL, needs_weights=False)
    def step(self) -> tuple[float, int]:
        self.counts["steps"] += 1
        return self.model[0].weight.item(), self.counts["steps"]


def test_a_replacing_model_gets_all_declarations_of_the_old_model(
    here: px.ResourcePool, tmp_path: Path
) -> None:
    source, target = (px.WorkerGroup(here[at : at + 1], Declared.bind(at + 1.0)) for at in (0, 1))
    target.step()
    px.save(target, tmp_path)
    px.WeightSync(source, target, "in", source_name="out", rename=lambda name: f"0.{name}")()
    assert target.step() == [(1.0, 2)]
    px.load(target, tmp_path)

    assert target.step() == [(2.0, 2)]
