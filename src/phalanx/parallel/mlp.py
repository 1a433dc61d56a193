"""The gated MLP of Llama in a single process, and the join of its tensor-parallel weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn import functional

from phalanx.errors import DeclarationError

SPLIT_DIM: Mapping[str, int] = {"gate_proj.weight": 0, "up_proj.weight": 0, "down_proj.weight": 1}
"""Dimension along which each weight is sharded over tp ranks (torch's Linear has (out, in))."""

_ACTIVATIONS = ("silu", "gelu", "relu")


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the activation function by its name in a model's configuration.

    Raises:
        DeclarationError: if ``name`` is not silu, gelu or relu.
    """
    if name not in _ACTIVATIONS:
        raise DeclarationError(f"hidden_act={name!r}: expected one of {', '.join(_ACTIVATIONS)}")
    return getattr(functional, name)


class LlamaMLP(torch.nn.Module):
    """``down(act(gate(x)) * up(x))`` without biases, as in Llama (Touvron et al., 2023; Shazeer, 2020).

    Inputs and outputs are (..., hidden_size). Parameters have the names of Hugging Face's Llama.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, hidden_act: str = "silu", init_std: float = 0.02
    ) -> None:
        super().__init__()
        self.act = activation(hidden_act)
        self.gate_proj = torch.nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = torch.nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = torch.nn.Linear(intermediate_size, hidden_size, bias=False)
        for weight in self.parameters():
            torch.nn.init.normal_(weight, std=init_std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


def join_shards(shards: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Join the weights (or gradients) of the tp ranks, in tp order, for ``LlamaMLP.load_state_dict``.

    Names may have a prefix, as in a model that contains the MLP. Sharded tensors are joined along their
    :data:`SPLIT_DIM`; all others are taken from tp rank 0.

    Raises:
        DeclarationError: if there are no shards, or their names differ.
    """
    if not shards or any(set(shard) != set(shards[0]) for shard in shards):
        names = [sorted(shard) for shard in shards]
        raise DeclarationError(
            f"join_shards: names by tp rank are {names}; expected the same names from every tp rank"
        )
    return {name: _joined(name, [shard[name].detach() for shard in shards]) for name in shards[0]}


def _joined(name: str, pieces: list[torch.Tensor]) -> torch.Tensor:
    dim = next((d for suffix, d in SPLIT_DIM.items() if name.endswith(suffix)), None)
    return pieces[0].clone() if dim is None else torch.cat(pieces, dim)
