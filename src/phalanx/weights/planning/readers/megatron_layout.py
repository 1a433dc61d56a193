"""Boxes of Megatron's parameters, read from the tags that its layers leave on them. Megatron is not imported.

Tags say how a tensor is cut over tensor parallelism. What they do not say is told: the ranks, which layers this
pipeline stage has, which experts, and how many rows of the vocabulary are true.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.errors import DeclarationError
from phalanx.weights.planning.boxes import Box, Patch
from phalanx.weights.planning.readers.plain import Reading, gather_reading, held_as, named_tensors
from phalanx.weights.planning.shard_manifest import Held

__all__ = ["MegatronRank", "read_megatron"]

_LAYER = re.compile(r"(?<![^.])layers\.(\d+)(?![^.])")
_EXPERT = re.compile(r"(?<![^.])local_experts\.(\d+)(?![^.])")
_LAST_LAYER = re.compile(r"(?<![^.])layers\.(\d+)$")
_LAST_EXPERT = re.compile(r"(?<![^.])local_experts\.(\d+)$")
_VOCABULARY = ("word_embeddings.weight", "output_layer.weight", "output_layer.bias")


@dataclass(frozen=True)
class MegatronRank:
    """This rank's place in Megatron's parallel state, as far as its parameters depend on it.

    Args:
        tp, tp_size: rank and size of tensor parallelism.
        expert_tp, expert_tp_size: those of experts; None is as for the rest.
        first_layer: global number of the stage's ``layers.0`` (Megatron counts from 0 on every stage).
        first_expert: global number of the rank's ``local_experts.0``.
        vocabulary: true rows of embedding and output layer; None takes the padded ones.
    """

    tp: int = 0
    tp_size: int = 1
    expert_tp: int | None = None
    expert_tp_size: int | None = None
    first_layer: int = 0
    first_expert: int = 0
    vocabulary: int | None = None

    @classmethod
    def here(cls, model: torch.nn.Module, *, vocabulary: int | None = None) -> MegatronRank:
        """The place of this process, by Megatron's parallel state and the layers and experts that ``model`` has.

        Args:
            model: this rank's part of the model, or what wraps it.
            vocabulary: true rows of embedding and output layer; None takes the padded ones.

        Raises:
            DeclarationError: there is no parallel state, or the layers of the model are not consecutive.
        """
        state: Any = sys.modules.get("megatron.core.parallel_state")
        if state is None or not state.model_parallel_is_initialized():
            raise DeclarationError(
                "px.weights.MegatronRank.here(...) before Megatron's parallel state is initialised; call "
                "initialize_model_parallel(...) first, or give the ranks: px.weights.MegatronRank(tp=..., tp_size=...)"
            )
        experts = _numbers(model, _LAST_EXPERT)
        return cls(
            tp=state.get_tensor_model_parallel_rank(),
            tp_size=state.get_tensor_model_parallel_world_size(),
            expert_tp=state.get_expert_tensor_parallel_rank(),
            expert_tp_size=state.get_expert_tensor_parallel_world_size(),
            first_layer=_first_layer(model),
            first_expert=state.get_expert_model_parallel_rank() * len(experts),
            vocabulary=vocabulary,
        )

    def name(self, local: str) -> str:
        """The name over all stages and expert ranks of a parameter that is ``local`` here."""
        name = _LAYER.sub(lambda found: f"layers.{int(found[1]) + self.first_layer}", local)
        return _EXPERT.sub(lambda found: f"local_experts.{int(found[1]) + self.first_expert}", name)

    def cut(self, name: str) -> tuple[int, int]:
        """Rank and size of the parallelism that cuts the parameter ``name``."""
        if _EXPERT.search(name) and self.expert_tp_size is not None:
            return self.expert_tp or 0, self.expert_tp_size
        return self.tp, self.tp_size


def _numbers(model: torch.nn.Module, pattern: re.Pattern[str]) -> dict[int, list[torch.nn.Module]]:
    """Modules whose path ends as ``pattern`` says, by the number in it."""
    found: dict[int, list[torch.nn.Module]] = {}
    for path, module in model.named_modules():
        if numbered := pattern.search(path):
            found.setdefault(int(numbered[1]), []).append(module)
    return found


def _first_layer(model: torch.nn.Module) -> int:
    """Global number of ``layers.0``, by what each layer says of itself: Megatron's ``layer_number`` counts from 1."""
    offsets = {
        told - 1 - number
        for number, modules in _numbers(model, _LAST_LAYER).items()
        for module in modules
        if isinstance(told := getattr(module, "layer_number", None), int)
    }
    if len(offsets) > 1:
        raise DeclarationError(
            f"the layers of this {type(model).__name__} say that they begin at {sorted(offsets)}: their global numbers "
            "are not consecutive; publish such parts one by one, each with px.weights.MegatronRank(first_layer=...)"
        )
    return offsets.pop() if offsets else 0


def read_megatron(model: Any, rank: MegatronRank) -> Reading:
    """Read a Megatron module's parameters, or a mapping of them by the names of this stage.

    A stage lists only what it has: other stages own the other names.

    Raises:
        DeclarationError: tags and shapes contradict each other.
    """
    local = {name: one for name, one in named_tensors(model).items() if "_extra_state" not in name}
    named: dict[str, torch.Tensor] = {}
    for name, tensor in local.items():
        if rank.name(name) in named:
            raise DeclarationError(
                f"two parameters are named {rank.name(name)} once layers are counted globally"
            )
        named[rank.name(name)] = tensor
    return gather_reading(named, _all_held(named, rank))


def _all_held(named: Mapping[str, torch.Tensor], rank: MegatronRank) -> dict[str, Held]:
    held: dict[str, Held] = {}
    for name, tensor in named.items():
        shape, patches = _cut(name, tensor, *rank.cut(name))
        if rank.vocabulary is not None and name.endswith(_VOCABULARY):
            shape = (rank.vocabulary, *shape[1:])
            patches = [_within(patch, rank.vocabulary) for patch in patches]
        held[name] = held_as(name, tensor, shape, patches)
    return held


def _cut(name: str, tensor: torch.Tensor, index: int, count: int) -> tuple[tuple[int, ...], list[Patch]]:
    """Global shape and boxes by the tags; stride 2 of a gated MLP is two boxes, [gate; up] of each rank."""
    sizes = tuple(tensor.shape)
    zero = (0,) * len(sizes)
    if not getattr(tensor, "tensor_model_parallel", False) or count == 1:
        return sizes, [Patch(Box(zero, sizes), zero)]
    dim = int(getattr(tensor, "partition_dim", 0))
    stride = int(getattr(tensor, "partition_stride", 1))
    if not 0 <= dim < len(sizes) or stride < 1 or sizes[dim] % stride:
        raise DeclarationError(
            f"{name} has local shape {list(sizes)}, which its tags partition_dim={dim} and "
            f"partition_stride={stride} do not fit"
        )
    step = sizes[dim] // stride
    shape = _with(sizes, dim, sizes[dim] * count)
    patches = [
        Patch(
            Box(_with(zero, dim, (part * count + index) * step), _with(sizes, dim, step)),
            _with(zero, dim, part * step),
        )
        for part in range(stride)
    ]
    return shape, patches


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _within(patch: Patch, rows: int) -> Patch:
    box = patch.box
    left = max(0, min(box.sizes[0], rows - box.offsets[0]))
    return patch._replace(box=Box(box.offsets, (left, *box.sizes[1:])))
