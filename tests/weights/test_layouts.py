"""Weights of real layouts on Ray, bit for bit: what torch and Megatron sharded arrives as torch shards it elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import phalanx as px
from phalanx.parallel.megatron import MegatronWorker
from phalanx.parallel.mlp import LlamaMLP
from phalanx.parallel.torch_native import DeviceMeshWorker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HIDDEN, INTERMEDIATE, WORDS = 12, 40, 13  # 13 and 40 leave uneven shards, and one that is empty


class Tiny(torch.nn.Module):
    """An embedding, two MLPs and a norm, in which no two values are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, HIDDEN)
        self.layers = torch.nn.ModuleList(LlamaMLP(HIDDEN, INTERMEDIATE) for _ in range(2))
        self.norm = torch.nn.LayerNorm(5)
        start = 0
        for parameter in self.parameters():
            with torch.no_grad():
                values = torch.arange(start, start + parameter.numel(), dtype=torch.float32)
                parameter.copy_(values.view_as(parameter))
            start += parameter.numel()


def plus(model: torch.nn.Module, amount: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(amount)


def tensor_parallel(model: Tiny, mesh: Any) -> Tiny:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"layers.*.gate_proj": ColwiseParallel(), "layers.*.up_proj": ColwiseParallel()}
    return parallelize_module(model, mesh, {**plan, "layers.*.down_proj": RowwiseParallel()})


def fully_sharded(model: Tiny, mesh: Any) -> Tiny:
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Meshes(DeviceMeshWorker):
    """Has meshes of its first ranks; ``made`` has each model by name, on the ranks that have it."""

    def __init__(self) -> None:
        super().__init__()
        self.init_mesh(dp=-1)
        self.made: dict[str, torch.nn.Module] = {}
        for name, sizes, make in self.layouts():
            mesh = self.mesh_of(sizes)
            if self.rank < torch.Size(sizes).numel():
                self.made[name] = make(Tiny(), mesh)

    def layouts(self) -> list[tuple[str, tuple[int, ...], Callable[[Tiny, Any], Tiny]]]:
        raise NotImplementedError

    def mesh_of(self, sizes: tuple[int, ...]) -> Any:
        from torch.distributed.device_mesh import DeviceMesh

        ranks = torch.arange(torch.Size(sizes).numel()).view(sizes)
        return DeviceMesh(self.device.type, ranks, mesh_dim_names=("replicas", "shards")[-len(sizes) :])


class Trainer(Meshes):
    def __init__(self) -> None:
        super().__init__()
        for name, model in self.made.items():
            self.publish_weights(name, model)

    def layouts(self) -> list[Any]:
        alone = [(f"fsdp{ranks}", (ranks,), fully_sharded) for ranks in (1, 2, 4)]
        return [*alone, ("hybrid", (2, 2), fully_sharded), ("fsdp over tp", (2, 2), self.both)]

    @staticmethod
    def both(model: Tiny, mesh: Any) -> Tiny:
        return fully_sharded(tensor_parallel(model, mesh["shards"]), mesh["replicas"])

    @px.register
    def train(self, name: str, amount: float) -> None:
        if name in self.made:
            plus(self.made[name], amount)


class Engine(Meshes):
    def __init__(self) -> None:
        super().__init__()
        for name, model in self.made.items():
            plus(model, -1e6)
            self.accept_weights(name, model)

    def layouts(self) -> list[Any]:
        alone = [(f"tp{ranks}", (ranks,), tensor_parallel) for ranks in (1, 2, 4)]
        return [*alone, ("fsdp4", (4,), fully_sharded)]

    @px.register
    def differs(self, name: str, amount: float) -> list[str]:
        """Names of tensors that are not the golden ones, cut by torch as this layout cuts them."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        golden = Tiny()
        plus(golden, amount)
        wanted: dict[str, Any] = dict(golden.named_parameters())
        odd: list[str] = []
        for key, one in self.made[name].named_parameters():
            value = wanted[key].detach().to(one.dtype)
            mine: torch.Tensor = one.detach()
            if isinstance(mine, DTensor):
                value = distribute_tensor(value, mine.device_mesh, mine.placements, src_data_rank=None)
                value, mine = value.to_local(), mine.to_local()
            if not torch.equal(value, mine):
                odd.append(key)
        return odd


@pytest.fixture(scope="module")
def groups(ray_cluster: None) -> Iterator[tuple[px.WorkerGroup, px.WorkerGroup]]:
    with (
        px.ResourcePool([4], use_gpu=False) as ours,
        px.ResourcePool([4], use_gpu=False) as theirs,
        px.WorkerGroup(ours, Trainer) as trainer,
        px.WorkerGroup(theirs, Engine) as engine,
    ):
        yield trainer, engine


def synced(groups: Any, source: str, sources: int, target: str, targets: int, amount: float) -> list[str]:
    """What is wrong on the targets after a sync of weights that were trained by ``amount``."""
    trainer, engine = groups
    trainer.train(source, amount)
    with px.WeightSync(
        trainer[:sources], engine[:targets], target, source_name=source, verify="full"
    ) as sync:
        sync()
        total = TRAINED[source] = TRAINED.get(source, 0.0) + amount
        wrong = [key for odd in engine[:targets].differs(target, total) for key in odd]
        trainer.train(source, amount)
        sync()
        total = TRAINED[source] = total + amount
        return wrong + [key for odd in engine[:targets].differs(target, total) for key in odd]


TRAINED: dict[str, float] = {}


@pytest.mark.parametrize(
    ("sources", "targets"),
    [(1, 4), (4, 1), (2, 4), (4, 2)]
    + [pytest.param(*sizes, marks=pytest.mark.soak) for sizes in [(1, 1), (1, 2), (2, 1), (2, 2), (4, 4)]],
)
def test_fsdp2_arrives_in_tensor_parallel_layers(groups: Any, sources: int, targets: int) -> None:
    assert synced(groups, f"fsdp{sources}", sources, f"tp{targets}", targets, 1.0) == []


def test_hybrid_shards_arrive_in_tensor_parallel_layers(groups: Any) -> None:
    assert synced(groups, "hybrid", 4, "tp2", 2, 2.0) == []


def test_shards_over_tensor_parallel_layers_arrive_in_other_shards(groups: Any) -> None:
    assert synced(groups, "fsdp over tp", 4, "fsdp4", 4, 3.0) == []


LAYERS, MEGATRON = 4, {"hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2}
PER_LAYER = {
    "self_attention.linear_proj.weight": (16, 16),
    "self_attention.linear_qkv.weight": (32, 16),
    "input_layernorm.weight": (16,),
    "pre_mlp_layernorm.weight": (16,),
    "mlp.linear_fc1.weight": (48, 16),
    "mlp.linear_fc2.weight": (16, 24),
}
SHAPES = {
    "embedding.word_embeddings.weight": (22, 16),
    "decoder.final_layernorm.weight": (16,),
    "output_layer.weight": (22, 16),
} | {f"decoder.layers.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in PER_LAYER.items()}


class Pretrainer(MegatronWorker):
    """A GPT of Megatron, tp 2 x pp 2, with a vocabulary that is padded from 22 to 24."""

    def __init__(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import TransformerConfig

        self.init_model_parallel(tp=2, pp=2)
        config = TransformerConfig(
            num_layers=LAYERS,
            ffn_hidden_size=24,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            normalization="RMSNorm",
            use_cpu_initialization=True,
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=2,
            pipeline_dtype=torch.float32,
            **MEGATRON,
        )
        self.model = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=24,
            max_sequence_length=32,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )
        for parameter in self.model.parameters():  # norms begin as ones on every layer
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter)
                torch.distributed.broadcast(
                    parameter.data,
                    parallel_state.get_tensor_model_parallel_src_rank(),
                    group=parallel_state.get_tensor_model_parallel_group(),
                )
        megatron = px.weights.MegatronRank.here(self.model, vocabulary=22)
        self.publish_weights("policy", self.model, megatron=megatron)

    @px.register
    def as_megatron_cuts(self) -> list[tuple[str, tuple[int, ...], torch.Tensor]]:
        """Name, offsets and values of each shard, by Megatron's own checkpoints."""
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

        groups = parallel_state.get_data_parallel_group(with_context_parallel=True)
        metadata = {"non_homogeneous_layers": True, "dp_cp_group": groups}
        shards: list[tuple[str, tuple[int, ...], torch.Tensor]] = []
        for value in self.model.sharded_state_dict(metadata=metadata).values():
            parts = nested_values(value.build()) if isinstance(value, ShardedTensorFactory) else [value]
            shards += [
                (one.key, one.global_offset, one.data.detach().clone())
                for one in parts
                if isinstance(one, ShardedTensor)
            ]
        return shards


class Learner(DeviceMeshWorker):
    """FSDP2 of two ranks over parameters of Megatron's names."""

    def __init__(self) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = self.init_mesh(dp=-1)
        self.model = torch.nn.Module()
        for name, shape in SHAPES.items():
            *path, last = name.split(".")
            module = self.model
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]  # type: ignore[assignment]
            module.register_parameter(last, torch.nn.Parameter(torch.full(shape, -7.0)))
        fully_shard(self.model, mesh=mesh)
        self.accept_weights("policy", self.model)

    @px.register(px.Dispatch.RANK_ZERO)
    def names(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters()]

    @px.register
    def full(self) -> dict[str, torch.Tensor]:
        return {name: one.full_tensor().detach() for name, one in self.model.named_parameters()}


def of_transformer_engine(key: str) -> str:
    """Checkpoints of Megatron name norms as Transformer Engine does, whatever the model has."""
    key = key.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
    return key.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
