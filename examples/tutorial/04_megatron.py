"""Tutorial 4: a layer that Megatron shards over four ranks, with ordinary calls.

The driver passes a list with one batch per data-parallel coordinate, and gets such a list back. The dispatch mode knows
which ranks get the same batch, and whose output counts.

    python examples/tutorial/04_megatron.py
    python examples/tutorial/04_megatron.py --hidden-size 4096 --intermediate-size 11008 --sequence 2048 --batch 16
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

import torch

import phalanx as px
from phalanx.parallel.megatron import MegatronWorker, MegatronWorkerGroup, ParallelLlamaMLP
from phalanx.parallel.mlp import LlamaMLP, join_shards

# Ranks of the inline backend run one after another, so they cannot cut a layer between them: one rank, then.
INLINE = os.environ.get("PHALANX_BACKEND") == "inline"


@dataclass(frozen=True)
class Config:
    """Sizes of the layer; any object that can be pickled may be an argument."""

    hidden_size: int
    intermediate_size: int
    hidden_act: str = "silu"


class MLPLayerWorker(MegatronWorker):
    """A worker whose Megatron parallel state is the group's mesh."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        self.init_model_parallel(tp=tp, pp=1, seed=10)  # nccl on GPUs, gloo on CPUs

    @px.register(px.Dispatch.ONE_TO_ALL)
    def init_model(self, config: Config) -> None:
        self.layer = ParallelLlamaMLP(
            config.hidden_size,
            config.intermediate_size,
            self.model_parallel_config(),
            hidden_act=config.hidden_act,
        )

    @px.register(px.Dispatch.ONE_TO_ALL)
    def get_weights(self) -> dict[str, torch.Tensor]:
        return {name: weight.cpu() for name, weight in self.layer.named_parameters()}

    @px.register(px.Dispatch.MEGATRON_COMPUTE, to_device=True)
    def run_layer(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.layer(x).cpu()


def one_process(config: Config, shards: list[dict[str, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
    """Return the output of an unsharded layer with the same weights."""
    layer = LlamaMLP(config.hidden_size, config.intermediate_size, hidden_act=config.hidden_act)
    layer.load_state_dict(join_shards(shards))
    with torch.no_grad():
        return layer(x)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=1 if INLINE else 4)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--intermediate-size", type=int, default=1376)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    args = parser.parse_args()

    use_gpu = torch.cuda.device_count() >= args.tp
    with px.ResourcePool([args.tp], use_gpu=use_gpu, max_colocate_count=1) as pool:
        group = MegatronWorkerGroup(pool, MLPLayerWorker.bind(args.tp))
        print(group.world_size, group.mesh())
        assert group.mesh() == px.Mesh(pp=1, dp=1, cp=1, tp=args.tp)

        config = Config(args.hidden_size, args.intermediate_size)
        group.init_model(config)
        x = torch.rand(args.sequence, args.batch, args.hidden_size)

        # One element per data-parallel coordinate: here there is one, and all four ranks get it.
        (output,) = group.run_layer([x])
        print(output.shape)
        assert output.shape == x.shape

        shards = group.get_weights()
        for rank, weights in enumerate(shards):
            print(f"rank {rank}:", {name: tuple(weight.shape) for name, weight in weights.items()})

        # The same layer in one process, from the weights of all ranks put together.
        difference = (output - one_process(config, shards, x)).abs().max().item()
        print(f"largest difference from one process: {difference:.1e}")
        assert difference <= 1e-5

    px.shutdown()


if __name__ == "__main__":
    main()
