"""Parts of the parallel workers that need no second process."""

from __future__ import annotations

import pytest
import torch

import phalanx as px
from phalanx.parallel.megatron import MegatronWorker, MegatronWorkerGroup
from phalanx.parallel.mlp import LlamaMLP, activation, join_shards
from phalanx.parallel.torch_native import DeviceMeshWorker


class Idle(px.Worker):
    """Stands in for a Megatron worker without loading Megatron."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, int] | None = None
        self.register_mesh("default", lambda: self.sizes)

    @px.register(px.Dispatch.ONE_TO_ALL)
    def lay_out(self, tp: int) -> None:
        self.sizes = {"pp": 0, "dp": self.rank // tp, "cp": 0, "tp": self.rank % tp}

    @px.register(px.Dispatch.MEGATRON_COMPUTE)
    def place(self, x: str) -> tuple[int, str]:
        return self.rank, x


class Lonely(DeviceMeshWorker):
    @px.register(px.Dispatch.ONE_TO_ALL)
    def lay_out(self) -> None:
        self.init_mesh(dp=-1)


def test_shards_join_to_full_weights_and_different_names_or_unknown_activations_are_refused() -> None:
    whole = dict(LlamaMLP(8, 12).named_parameters())
    parts = {name: weight.chunk(2, 1 if "down" in name else 0) for name, weight in whole.items()}
    joined = join_shards([{name: pieces[rank] for name, pieces in parts.items()} for rank in range(2)])

    assert all(torch.equal(joined[name], weight) for name, weight in whole.items())
    assert join_shards([{"norm.weight": torch.ones(3)}] * 2)["norm.weight"].shape == (3,)
    with pytest.raises(px.DeclarationError, match="expected the same names from every tp rank"):
        join_shards([{"gate_proj.weight": torch.ones(1)}, {}])
    with pytest.raises(px.DeclarationError, match="'swish': expected one of silu, gelu, relu"):
        activation("swish")


def test_a_mesh_is_read_once_ranks_have_it_and_read_again_after_a_refresh() -> None:
    with px.ResourcePool([4], use_gpu=False, backend="inline") as pool:
        with pytest.raises(px.DeclarationError, match="read from Megatron's parallel state"):
            MegatronWorkerGroup(pool, Idle, mesh=px.Mesh(dp=-1))
        group = MegatronWorkerGroup(pool, Idle)
        with pytest.raises(px.DispatchError, match="has no mesh 'default'"):
            group.mesh()
        group.lay_out(tp=2)
        assert group.mesh() == px.Mesh(pp=1, dp=2, cp=1, tp=2)
        assert group.place(["a", "b"]) == [(0, "a"), (2, "b")]
        group.lay_out(tp=4)
        group.refresh_mesh()
        assert group.place(["a"]) == [(0, "a")]


def test_several_ranks_in_one_process_cannot_form_a_process_group(here: px.ResourcePool) -> None:
    with pytest.raises(px.PhalanxError, match="cannot work with backend='inline'"):
        px.WorkerGroup(here, Lonely).lay_out()


def test_a_worker_outside_of_a_group_is_a_single_rank_and_refuses_a_larger_mesh() -> None:
    assert (MegatronWorker().rank, MegatronWorker().world_size) == (0, 1)
    with pytest.raises(px.DeclarationError, match="tp=2"):
        DeviceMeshWorker().init_mesh(dp=2, tp=2)
