"""Syncs between real layouts on Ray, bit for bit, and workers with Megatron's layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import phalanx as px
from phalanx.parallel.megatron import MegatronWorker
from phalanx.parallel.mlp import LlamaMLP
from phalanx.parallel.torch_native import DeviceMeshWorker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HIDDEN, INTERMEDIATE, WORDS = 12, 40, 13  # 13 and 40 leave uneven shards and an empty shard


class Tiny(torch.nn.Module):
    """An embedding, two MLPs and a norm, with no two equal values."""

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
    plan = {"layers.*.gate_proj": ColwiseParallel(), "layers.*.up_proj": ColwiseParallel()}
    return parallelize_module(model, mesh, {**plan, "layers.*.down_proj": RowwiseParallel()})


def fully_sharded(model: Tiny, mesh: Any) -> Tiny:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(tensor: Any) -> torch.Tensor:
    return tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


class Sharded(DeviceMeshWorker):
    """The model in a layout over all ranks, with ``amount`` added to its values."""

    def __init__(self, layout: str, amount: float = 0.0) -> None:
        super().__init__()
        flat = layout in ("fsdp", "tp", "plain")
        mesh = self.init_mesh(shards=-1) if flat else self.init_mesh(replicas=2, shards=-1)
        shard = {"tp": tensor_parallel, "fsdp over tp": self.both}.get(layout, fully_sharded)
        self.model = Tiny() if layout == "plain" else shard(Tiny(), mesh)
        plus(self.model, amount)

    @staticmethod
    def both(model: Tiny, mesh: Any) -> Tiny:
        return fully_sharded(tensor_parallel(model, mesh["shards"]), mesh["replicas"])


class Trainer(Sharded):
    def __init__(self, layout: str) -> None:
        super().__init__(layout)
        self.publish_weights("model", self.model)

    @px.register
    def train(self) -> None:
        plus(self.model, 1.0)


class Engine(Sharded):
    def __init__(self, layout: str) -> None:
        super().__init__(layout, -1e6)
        self.accept_weights("model", self.model)

    @px.register
    def differs(self, amount: float) -> list[str]:
        """Return the names of tensors that are not the golden tensors plus ``amount``."""
        golden = Tiny()
        plus(golden, amount)
        wanted = dict(golden.named_parameters())
        return [
            name for name, one in self.model.named_parameters() if not torch.equal(whole(one), wanted[name])
        ]


@pytest.mark.parametrize(
    ("source", "sources", "target", "targets"),
    [("fsdp", 2, "tp", 4), ("fsdp", 4, "tp", 2), ("hybrid", 4, "tp", 2), ("fsdp over tp", 4, "fsdp", 4)],
)
def test_weights_arrive_in_another_layout(
    ray_cluster: None, source: str, sources: int, target: str, targets: int
) -> None:
    with (
        px.ResourcePool([sources], use_gpu=False) as ours,
        px.ResourcePool([targets], use_gpu=False) as theirs,
        px.WorkerGroup(ours, Trainer.bind(source)) as trainer,
        px.WorkerGroup(theirs, Engine.bind(target)) as engine,
        px.WeightSync(trainer, engine, "model", verify="full") as sync,
    ):
        for amount in (1.0, 2.0):
            trainer.train()
            sync()
            assert engine.differs(amount) == [[]] * targets


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
    """A GPT of Megatron on tp 2 x pp 2, with a vocabulary padded from 22 to 24."""

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
        for parameter in self.model.parameters():  # all norms are initialized with ones
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
        """Return name, offsets and values of each shard, as Megatron's checkpoints have them."""
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
    """An FSDP2 model of two ranks with Megatron's names of parameters."""

    def __init__(self) -> None:
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

    @px.register
    def full(self) -> dict[str, torch.Tensor]:
        return {name: whole(one) for name, one in self.model.named_parameters()}


def of_transformer_engine(key: str) -> str:
    """Return the model's name of a norm, which Megatron's checkpoints name as Transformer Engine does."""
    key = key.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
    return key.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
