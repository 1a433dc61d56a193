"""Saves of real layouts on Ray: shards of torch and Megatron are loaded bit for bit into other layouts.

A sync of Megatron's weights is tested here, too, because its groups take longest to start.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import phalanx as px
from phalanx.checkpoint.steps import listed
from phalanx.parallel.megatron import MegatronWorkerGroup
from phalanx.parallel.torch_native import DeviceMeshWorker
from tests.checkpoint.save_workers import Rows
from tests.weights.test_layouts import (
    SHAPES,
    Learner,
    Pretrainer,
    Sharded,
    Tiny,
    of_transformer_engine,
    plus,
    whole,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def adam(parameters: Any) -> torch.optim.Adam:
    return torch.optim.Adam(list(parameters), lr=0.0)


def one_step(optimizer: torch.optim.Optimizer) -> None:
    """Step with the parameters as gradients and a rate of 0, so that the parameters determine the moments."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.detach().clone()
    optimizer.step()


def golden(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the parameters with their moments after one step."""
    whole = {name: torch.nn.Parameter(one.clone()) for name, one in parameters.items()}
    optimizer = adam(whole.values())
    one_step(optimizer)
    return everything(whole, optimizer)


def everything(named: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the parameters and their optimizer state as full tensors."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in named.items():
        leaves = {"": parameter, **optimizer.state[parameter]}
        for leaf, one in leaves.items():
            found[f"{name}/{leaf}"] = whole(one)
    return found


class Saved(Sharded):
    def __init__(self, layout: str, amount: float = 0.0) -> None:
        super().__init__(layout, amount)
        self.optimizer = adam(self.model.parameters())
        px.register_state(self, model=self.model, optimizer=self.optimizer, rng=False)


def step(worker: Any) -> None:
    one_step(worker.optimizer)


def everything_of(worker: Any) -> dict[str, torch.Tensor]:
    return everything(dict(worker.model.named_parameters()), worker.optimizer)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("fsdp over tp", 4), ("tp", 2)),
        *(
            pytest.param(source, target, marks=pytest.mark.soak)
            for source, target in [
                (("fsdp over tp", 4), ("fsdp", 2)),
                (("fsdp", 2), ("tp", 2)),
                (("fsdp", 4), ("fsdp", 2)),
                (("fsdp", 4), ("plain", 2)),
                (("tp", 2), ("tp", 4)),
            ]
        ),
    ],
)
def test_model_and_moments_are_loaded_into_another_layout(
    ray_cluster: None, tmp_path: Path, source: tuple[str, int], target: tuple[str, int]
) -> None:
    with (
        px.ResourcePool([source[1]], use_gpu=False) as pool,
        px.WorkerGroup(pool, Saved.bind(source[0])) as group,
    ):
        group.run(step)
        px.save.submit(group, tmp_path).result(60)

    with (
        px.ResourcePool([target[1]], use_gpu=False) as pool,
        px.WorkerGroup(pool, Saved.bind(target[0], -5.0)) as group,
    ):
        px.load(group, tmp_path)
        found = group.run(everything_of)

    wanted = golden(dict(Tiny().named_parameters()))
    for rank in found:
        assert rank.keys() == wanted.keys()
        assert all(torch.equal(rank[name], wanted[name]) for name in wanted)


class Evaluated(DeviceMeshWorker):
    """A layer that FSDP2 shards, and that a forward pass without gradients leaves gathered."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.model = torch.nn.Linear(4, 3)
        for parameter in self.model.parameters():
            torch.nn.init.constant_(parameter, fill)
        fully_shard(self.model, mesh=self.init_mesh(dp=-1))
        px.register_state(self, model=self.model, rng=False)
        self.publish_weights("layer", self.model)
        self.accept_weights("layer", self.model)

    @px.register
    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(torch.ones(1, 4))

    @px.register
    def train(self) -> float:
        loss = self.model(torch.ones(1, 4)).sum()
        loss.backward()
        return loss.item()


def test_saves_loads_and_syncs_work_after_a_forward_pass_without_gradients(
    ray_cluster: None, tmp_path: Path
) -> None:
    with px.ResourcePool([2], use_gpu=False, max_colocate_count=3) as pool:
        saved, loaded = px.WorkerGroup(pool, Evaluated.bind(1.0)), px.WorkerGroup(pool, Evaluated.bind(-1.0))
        saved.evaluate()
        px.save(saved, tmp_path)
        loaded.evaluate()
        px.load(loaded, tmp_path)

        assert saved.train() == loaded.train() == [15.0, 15.0]

        changed = px.WorkerGroup(pool, Evaluated.bind(2.0))
        changed.evaluate()
        loaded.evaluate()
        px.WeightSync(changed, loaded, "layer")()

        assert loaded.train() == [30.0, 30.0]


class Noise(px.Worker):
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed + self.rank)
        px.register_state(self, model={"w": torch.zeros(2)})

    @px.register
    def draw(self) -> float:
        return torch.rand(1).item()


def test_random_generators_are_loaded_by_rank_on_another_number_of_ranks(
    ray_cluster: None, tmp_path: Path
) -> None:
    with px.ResourcePool([2], use_gpu=False) as pool, px.WorkerGroup(pool, Noise.bind(0)) as group:
        px.save(group, tmp_path)
        drawn = group.draw()

    own = torch.rand(1, generator=torch.Generator().manual_seed(102)).item()
    for ranks in (1, 3):
        with px.ResourcePool([ranks], use_gpu=False) as pool, px.WorkerGroup(pool, Noise.bind(100)) as group:
            px.load(group, tmp_path)

            assert group.draw() == [*drawn, own][:ranks]


class SavedPretrainer(Pretrainer):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = adam(self.model.parameters())
        megatron = px.weights.MegatronRank.here(self.model, vocabulary=22)
        px.register_state(self, model=self.model, optimizer=self.optimizer, megatron=megatron, rng=False)


class SavedLearner(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = adam(self.model.parameters())
        px.register_state(self, model=self.model, optimizer=self.optimizer, rng=False)


@pytest.fixture(scope="module")
def stages_and_shards(ray_cluster: None) -> Iterator[tuple[MegatronWorkerGroup, px.WorkerGroup]]:
    """A GPT of Megatron, and an FSDP2 model with the same parameter names."""
    if find_spec("megatron") is None:
        pytest.skip("needs the extra phalanx[megatron] (Linux)")
    with (
        px.ResourcePool([4], use_gpu=False) as ours,
        px.ResourcePool([2], use_gpu=False) as theirs,
        MegatronWorkerGroup(ours, SavedPretrainer) as trainer,
        px.WorkerGroup(theirs, SavedLearner) as learner,
    ):
        yield trainer, learner


def by_name(trainer: MegatronWorkerGroup) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
    """Yield name, offsets and values of each shard as Megatron reports them."""
    for key, offsets, data in (shard for rank in trainer.as_megatron_cuts() for shard in rank):
        yield of_transformer_engine(key), offsets, data


def is_cut_out(part: torch.Tensor, whole: torch.Tensor, offsets: tuple[int, ...]) -> bool:
    """Return whether ``part`` equals the slice of ``whole`` at ``offsets``, without padding of the vocabulary."""
    cut = tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))
    return torch.equal(whole[cut], part[: whole[cut].shape[0]])


def test_a_sync_from_megatron_to_fsdp2_puts_shards_at_the_offsets_that_megatron_reports(
    stages_and_shards: tuple[MegatronWorkerGroup, px.WorkerGroup],
) -> None:
    trainer, learner = stages_and_shards

    px.WeightSync(trainer, learner, "policy", verify="full")()

    found, other = learner.full()
    cuts = list(by_name(trainer))
    assert {name for name, _, _ in cuts} == set(SHAPES)
    assert [name for name, offsets, data in cuts if not is_cut_out(data, found[name], offsets)] == []
    assert all(torch.equal(found[name], other[name]) for name in found)


def test_stages_and_shards_saved_by_megatron_are_loaded_into_fsdp2(
    stages_and_shards: tuple[MegatronWorkerGroup, px.WorkerGroup], tmp_path: Path
) -> None:
    trainer, learner = stages_and_shards
    learner.run(lambda worker: plus(worker.model, -1e6))  # overwrites the weights that a sync has set

    trainer.run(step)
    px.save(trainer, tmp_path)
    px.load(learner, tmp_path)

    found, other = learner.run(everything_of)
    cuts = list(by_name(trainer))
    assert [name for name, offsets, data in cuts if not is_cut_out(data, found[f"{name}/"], offsets)] == []
    wanted = golden({name.removesuffix("/"): one for name, one in found.items() if name.endswith("/")})
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert all(torch.equal(found[name], other[name]) for name in wanted)


def test_a_rank_that_dies_during_a_save_fails_this_save_and_a_save_that_waits_for_it(
    ray_cluster: None, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    go.mkdir()
    with px.ResourcePool([2], use_gpu=False) as pool, px.WorkerGroup(pool, Rows) as group:
        px.save(group, tmp_path / "run", step=1)
        group.run(die_in_a_write, str(go))
        first = px.save.submit(group, tmp_path / "run", step=2)
        second = ThreadPoolExecutor(1).submit(px.save, group, tmp_path / "run", step=3)
        go.rmdir()

        with pytest.raises(px.checkpoint.CheckpointError, match=r"rank 1 .*step 2: it died"):
            first.result(60)
        with pytest.raises(px.PhalanxError, match="rank 1"):
            second.result(60)
        assert [(one.number, one.whole) for one in listed(str(tmp_path / "run"))] == [(1, True)]

        group.restart()
        assert px.load(group, tmp_path / "run").step == 1
        assert px.save(group, tmp_path / "run", step=4).step == 4

        group.run(die_in_a_write, "")
        with pytest.raises(px.WorkerDiedError, match="rank 1"):
            px.save(group, tmp_path / "run", step=5)
        assert [one.number for one in listed(str(tmp_path / "run"))] == [1, 4]


def test_a_store_that_other_processes_cannot_see_is_refused(ray_cluster: None) -> None:
    with px.ResourcePool([2], use_gpu=False) as pool, px.WorkerGroup(pool, Rows) as group:
        for save in (px.save, lambda *given: px.save.submit(*given).result(60)):
            with pytest.raises(px.checkpoint.CheckpointError, match="only one node sees"):
                save(group, "memory://apart/run")


def die_in_a_write(worker: Any, go: str) -> None:
    """Make rank 1 kill itself during a write, once ``go`` does not exist."""
    import os
    import signal
    import time

    from phalanx.checkpoint import step_files

    def killed(self: Any, data: Any) -> None:
        while os.path.exists(go):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    if worker.rank == 1:
        step_files.DirectFile.write = killed  # type: ignore[method-assign]
