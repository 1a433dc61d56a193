"""Layouts of ranks are read from their tensors: plain tensors, DTensors and Megatron's tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, debug, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import phalanx as px
from phalanx.declare.weight_declarations import Published
from phalanx.errors import DeclarationError, WeightsMismatch
from phalanx.weights.boxes import cut, local_boxes, volume
from phalanx.weights.local_layout import (
    LocalLayout,
    MegatronRank,
    current_tensors,
    read_layout,
    read_megatron,
    read_tensors,
)
from phalanx.weights.manifest import HeldTensor
from tests.weights.weight_workers import NAME, Accepter, Publisher, arrived, groups, linked, told

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Make this process one rank of a world whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        debug._clear_sharding_prop_cache()  # its meshes have the former rank of this process


def held(reading: LocalLayout, name: str) -> HeldTensor:
    return dict(reading.manifest.items())[name]


def holds_its_boxes(reading: LocalLayout, name: str, full: torch.Tensor) -> bool:
    """Return whether the local tensor has the values of the full tensor in the boxes that were read."""
    local = reading.tensors[name]
    patches = held(reading, name).boxes
    return sum(volume(patch.box) for patch in patches) == local.numel() and all(
        torch.equal(cut(local, patch.at, patch.box.sizes), cut(full, patch.box.offsets, patch.box.sizes))
        for patch in patches
    )


def golden(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


PLACED = [
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((4,), [Replicate()]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 3), [Shard(0), Shard(0)]),
    ((2, 2, 2), [Shard(1), Shard(0), Shard(1)]),
]


@pytest.mark.parametrize("rows", [1, 7, 8])
@pytest.mark.parametrize(("sizes", "placements"), PLACED)
def test_boxes_are_the_shards_that_torch_distributes(
    sizes: tuple[int, ...], placements: list[Placement], rows: int
) -> None:
    full = golden(rows, 5)
    world_size = torch.Size(sizes).numel()

    for rank in range(world_size):
        with as_rank(rank, world_size):
            mesh = init_device_mesh("cpu", sizes)
            reading = read_tensors({"w": distribute_tensor(full, mesh, placements, src_data_rank=None)})
        assert holds_its_boxes(reading, "w", full)


def fsdp_over_tp(full: torch.Tensor, mesh: DeviceMesh, tp_dim: int) -> nn.Module:
    """A weight sharded by tensor parallelism and then by FSDP2, and a norm sharded only by FSDP2."""
    module = nn.Linear(full.shape[1], full.shape[0], bias=False)
    sharded = distribute_tensor(full, mesh["tp"], [Shard(tp_dim)], src_data_rank=None)
    module.weight = nn.Parameter(sharded)
    module.norm = nn.Parameter(golden(5))
    fully_shard(module, mesh=mesh["fsdp"])
    return module


@pytest.mark.parametrize("tp_dim", [0, 1])
@pytest.mark.parametrize("rows", [3, 8, 13])
@pytest.mark.parametrize(("fsdp", "tp"), [(2, 2), (4, 2), (2, 3)])
def test_boxes_are_the_shards_of_fsdp_over_tensor_parallelism(
    fsdp: int, tp: int, rows: int, tp_dim: int
) -> None:
    full = golden(rows, 6)

    for rank in range(fsdp * tp):
        with as_rank(rank, fsdp * tp):
            mesh = init_device_mesh("cpu", (fsdp, tp), mesh_dim_names=("fsdp", "tp"))
            reading = read_tensors(fsdp_over_tp(full, mesh, tp_dim))
        assert holds_its_boxes(reading, "weight", full)
        assert holds_its_boxes(reading, "norm", golden(5))


def test_a_strided_shard_has_several_boxes_unless_its_rows_are_adjacent() -> None:
    full = golden(8)

    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        local = full[[0, 1, 4, 5]]
        tensor = DTensor.from_local(local, mesh, [_StridedShard(0, split_factor=2)], run_check=False)
        reading = read_tensors({"w": tensor})
    with as_rank(0, 4), torch.device("meta"):
        mesh, local = init_device_mesh("cpu", (2, 2)), torch.empty(38_016, 8)
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        tensor = DTensor.from_local(local, mesh, placements, run_check=False)
        large = read_tensors({"w": tensor})  # without listing its rows

    assert [str(patch.box) for patch in held(reading, "w").boxes] == ["[0:2]", "[4:6]"]
    assert holds_its_boxes(reading, "w", full)
    assert [str(patch.box) for patch in held(large, "w").boxes] == ["[0:38016, 0:8]"]
    adjacent, apart = [range(2), range(2, 5)], [range(2), range(4, 5)]
    boxes = [(str(patch.box), patch.at) for patch in local_boxes([adjacent, apart])]
    assert boxes == [("[0:5, 0:2]", (0, 0)), ("[0:5, 4:5]", (0, 2))]


def test_a_tensor_that_is_sharded_along_other_dims_needs_a_new_plan() -> None:
    weights: dict[str, torch.Tensor] = {}
    with as_rank(1, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        weights["w"] = DTensor.from_local(golden(2, 2), mesh, [Shard(0), Shard(1)], run_check=False)
        declared = Published(weights)
        planned = read_layout(declared)
        assert current_tensors(declared, planned).keys() == {"w"}

        weights["w"] = DTensor.from_local(golden(2, 2), mesh, [Shard(1), Shard(0)], run_check=False)
        with pytest.raises(WeightsMismatch, match="do not match the plan of this sync: w"):
            current_tensors(declared, planned)


def test_storage_of_distributed_tensors_cannot_be_shared() -> None:
    def placed(_: int) -> dict[str, torch.Tensor]:
        return {"w": distribute_tensor(golden(2), init_device_mesh("cpu", (1,)), [Shard(0)])}

    roles = {"actor": Publisher.bind(placed), "rollout": Accepter.bind(placed, share=told(True))}
    refused = pytest.raises(DeclarationError, match=r"no DTensors, .*; others are w:")
    with as_rank(0, 1), groups(px.colocate(roles)) as (group,), refused:
        px.WeightSync(group.actor, group.rollout, NAME)()


def test_a_rank_outside_of_the_mesh_holds_nothing() -> None:
    with as_rank(2, 3):
        mesh = DeviceMesh("cpu", [0, 1])
        tensor = DTensor.from_local(
            torch.empty(0), mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,)
        )
        reading = read_tensors({"w": tensor})

    assert held(reading, "w").boxes == () and held(reading, "w").shape == (4,)


@pytest.mark.parametrize(
    ("local", "placement", "why"),
    [
        (torch.ones(4), Partial(), r"w is placed as .*redistribute it first"),
        (torch.ones(3), Shard(0), r"w: its placements .*local shape \[3\]"),
    ],
)
def test_placements_that_cannot_be_read_are_refused_by_name(
    local: torch.Tensor, placement: Placement, why: str
) -> None:
    with as_rank(0, 2):
        mesh, options = init_device_mesh("cpu", (2,)), {"shape": torch.Size([4]), "stride": (1,)}
        tensor = DTensor.from_local(local, mesh, [placement], run_check=False, **options)

        with pytest.raises(DeclarationError, match=why):
            read_tensors({"w": tensor})


def tagged(tensor: torch.Tensor, dim: int, stride: int = 1) -> torch.Tensor:
    """Return a parameter with the tags of Megatron's layers."""
    parameter = tensor.clone()
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.partition_dim = dim  # type: ignore[attr-defined]
    parameter.partition_stride = stride  # type: ignore[attr-defined]
    return parameter


def test_layers_and_experts_have_global_numbers_and_extra_state_is_left_out() -> None:
    rank = MegatronRank(first_layer=2, first_expert=4)
    named = {"layers.1.local_experts.3.w": torch.zeros(2), "fc._extra_state": torch.zeros(1)}
    grouped = {f"layers.0.mlp.experts.linear_fc1.weight{number}": torch.zeros(2) for number in (0, 1)}
    unknown = {"layers.0.mlp.experts.weight1": torch.zeros(2)}  # of all experts of the rank
    for tensor in (*grouped.values(), *unknown.values()):
        tensor.allreduce = False  # type: ignore[attr-defined]

    assert list(read_megatron(named, rank).tensors) == ["layers.3.local_experts.7.w"]
    found = read_megatron(grouped, rank).tensors
    assert list(found) == [f"layers.2.mlp.experts.linear_fc1.weight{number}" for number in (4, 5)]
    with pytest.raises(DeclarationError, match=r"experts\.weight1 belongs to different experts"):
        read_megatron(unknown, rank)


def test_persistent_buffers_of_checkpointed_modules_are_read() -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    block.register_buffer("scratch", torch.zeros(1), persistent=False)
    model, under = nn.Sequential(checkpoint_wrapper(block)), "0._checkpoint_wrapped_module."

    assert read_tensors(model).tensors.keys() == {f"{under}{name}" for name in block.state_dict()}


def test_experts_have_their_own_tp_size_and_tags_that_do_not_fit_the_shape_are_refused() -> None:
    rank = MegatronRank(tp=1, tp_size=2, expert_tp=0, expert_tp_size=1)

    reading = read_megatron({"local_experts.0.w": tagged(torch.zeros(4), 0)}, rank)

    assert held(reading, "local_experts.0.w").shape == (4,)
    with pytest.raises(DeclarationError, match="fc1 has local shape"):
        read_megatron({"fc1": tagged(torch.zeros(3), 0, 2)}, MegatronRank(tp=0, tp_size=2))


class Part(nn.Module):
    """A pipeline stage of Megatron: layers with their global numbers, and some of the experts."""

    def __init__(self, numbers: Sequence[int], experts: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in numbers)
        for layer, number in zip(self.layers, numbers, strict=True):
            layer.layer_number = number
            layer.local_experts = nn.ModuleList(nn.Linear(1, 1) for _ in range(experts))


def test_the_position_of_a_rank_is_read_from_megatrons_parallel_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = {  # on the last rank of tp 2 x ep 2, with experts that are not sharded
        "model_parallel_is_initialized": True,
        "get_tensor_model_parallel_rank": 1,
        "get_tensor_model_parallel_world_size": 2,
        "get_expert_tensor_parallel_rank": 0,
        "get_expert_tensor_parallel_world_size": 1,
        "get_expert_model_parallel_rank": 1,
    }
    state = SimpleNamespace(**{name: lambda value=value: value for name, value in told.items()})
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)

    here = MegatronRank.here(Part([3, 4], experts=4), vocabulary=22)
    assert here == MegatronRank(1, 2, 0, 1, first_layer=2, first_expert=4, vocabulary=22)
    with pytest.raises(DeclarationError, match=r"begin at \[0, 3\]"):
        MegatronRank.here(Part([1, 5]))  # not consecutive
    monkeypatch.delitem(sys.modules, "megatron.core.parallel_state")
    with pytest.raises(DeclarationError, match="initialize_model_parallel"):
        MegatronRank.here(Part([1]))


def test_padding_of_the_vocabulary_is_not_synced() -> None:
    name, full = "word_embeddings.weight", golden(5, 2)
    padded = torch.cat([full, torch.full((3, 2), -1.0)])
    publishing = Publisher.bind(
        lambda rank: {name: tagged(padded.chunk(2)[rank], 0)},
        megatron=lambda rank: MegatronRank(tp=rank, tp_size=2, vocabulary=5),
    )
    accepting = Accepter.bind(lambda _: {name: torch.zeros(5, 2)})
    with linked(publishing, accepting, sizes=(2, 1)) as (_, target, sync):
        sync()

        assert torch.equal(arrived(target)[name], full)
