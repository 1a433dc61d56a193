"""The layout of Megatron's parameters, read from the tags of its layers. Megatron is not imported.

Tags tell how tensor parallelism cuts a tensor. ``MegatronRank`` has the rest: ranks, layers of the pipeline stage,
experts, and the rows of the vocabulary without padding.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.errors import DeclarationError
from phalanx.weights.boxes import Box, LocalBox
from phalanx.weights.local_layout import LocalLayout, held_as, make_layout, named_tensors
from phalanx.weights.manifest import HeldTensor

_LAYER = re.compile(r"(?<![^.])layers\.(\d+)(?![^.])")
_EXPERT = re.compile(r"(?<![^.])local_experts\.(\d+)(?![^.])")
_LAST_LAYER = re.compile(r"(?<![^.])layers\.(\d+)$")
_LAST_EXPERT = re.compile(r"(?<![^.])local_experts\.(\d+)$")
_VOCABULARY = ("word_embeddings.weight", "output_layer.weight", "output_layer.bias")


@dataclass(frozen=True)
class MegatronRank:
    """This rank's position in Megatron's parallel state, as far as its parameters depend on it.

    Args:
        tp, tp_size: rank and size of tensor parallelism.
        expert_tp, expert_tp_size: rank and size for experts; None uses ``tp`` and ``tp_size``.
        first_layer: global number of the stage's ``layers.0`` (Megatron counts from 0 on every stage).
        first_expert: global number of the rank's ``local_experts.0``.
        vocabulary: rows of embedding and output layer without padding; None takes the padded rows.
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
        """Return the position of this process, read from Megatron's parallel state and from ``model``.

        Args:
            model: this rank's part of the model, or its wrapper.
            vocabulary: rows of embedding and output layer without padding; None takes the padded rows.

        Raises:
            DeclarationError: if there is no parallel state, or the layers of the model are not consecutive.
        """
        state: Any = sys.modules.get("megatron.core.parallel_state")
        if state is None or not state.model_parallel_is_initialized():
            raise DeclarationError(
                "px.weights.MegatronRank.here(...) before Megatron's parallel state is initialized; call "
                "initialize_model_parallel(...) first, or pass the ranks: px.weights.MegatronRank(tp=..., tp_size=...)"
            )
        experts = len(_numbered_modules(model, _LAST_EXPERT))
        return cls(
            tp=state.get_tensor_model_parallel_rank(),
            tp_size=state.get_tensor_model_parallel_world_size(),
            expert_tp=state.get_expert_tensor_parallel_rank(),
            expert_tp_size=state.get_expert_tensor_parallel_world_size(),
            first_layer=_first_layer(model),
            first_expert=state.get_expert_model_parallel_rank() * experts,
            vocabulary=vocabulary,
        )

    def name(self, local: str) -> str:
        """Return the name over all stages and expert ranks of a parameter named ``local`` on this rank."""
        name = _LAYER.sub(lambda match: f"layers.{int(match[1]) + self.first_layer}", local)
        return _EXPERT.sub(lambda match: f"local_experts.{int(match[1]) + self.first_expert}", name)

    def cut(self, name: str) -> tuple[int, int]:
        """Return rank and size of the parallelism that cuts the parameter ``name``."""
        if _EXPERT.search(name) and self.expert_tp_size is not None:
            return self.expert_tp or 0, self.expert_tp_size
        return self.tp, self.tp_size


def _numbered_modules(model: torch.nn.Module, pattern: re.Pattern[str]) -> dict[int, list[torch.nn.Module]]:
    """Return the modules whose path ends as ``pattern`` says, by the number in it."""
    modules: dict[int, list[torch.nn.Module]] = {}
    for path, module in model.named_modules():
        if match := pattern.search(path):
            modules.setdefault(int(match[1]), []).append(module)
    return modules


def _first_layer(model: torch.nn.Module) -> int:
    """Return the global number of ``layers.0``, from Megatron's ``layer_number``, which counts from 1."""
    offsets = {
        layer - 1 - number
        for number, modules in _numbered_modules(model, _LAST_LAYER).items()
        for module in modules
        if isinstance(layer := getattr(module, "layer_number", None), int)
    }
    if len(offsets) > 1:
        raise DeclarationError(
            f"the layers of this {type(model).__name__} begin at {sorted(offsets)}: their global numbers are not "
            "consecutive; publish such parts separately, each with px.weights.MegatronRank(first_layer=...)"
        )
    return offsets.pop() if offsets else 0


def read_megatron(model: Any, rank: MegatronRank) -> LocalLayout:
    """Read a Megatron module's parameters, or a mapping of them by the names of this stage.

    Raises:
        DeclarationError: if tags and shapes contradict each other.
    """
    named: dict[str, torch.Tensor] = {}
    held: dict[str, HeldTensor] = {}
    for local_name, tensor in named_tensors(model).items():
        if "_extra_state" in local_name:
            continue
        name = rank.name(local_name)
        if name in named:
            raise DeclarationError(f"two parameters are named {name} once layers are counted globally")
        named[name] = tensor
        shape, boxes = _boxes(name, tensor, *rank.cut(name))
        if rank.vocabulary is not None and name.endswith(_VOCABULARY):
            shape = (rank.vocabulary, *shape[1:])
            boxes = [_limit_rows(box, rank.vocabulary) for box in boxes]
        held[name] = held_as(name, tensor, shape, boxes)
    return make_layout(named, held)


def _boxes(name: str, tensor: torch.Tensor, index: int, count: int) -> tuple[tuple[int, ...], list[LocalBox]]:
    """Return global shape and boxes. Stride 2, of a gated MLP, is two boxes: [gate; up] of each rank."""
    sizes = tuple(tensor.shape)
    zero = (0,) * len(sizes)
    if not getattr(tensor, "tensor_model_parallel", False) or count == 1:
        return sizes, [LocalBox(Box(zero, sizes), zero)]
    dim = int(getattr(tensor, "partition_dim", 0))
    stride = int(getattr(tensor, "partition_stride", 1))
    if not 0 <= dim < len(sizes) or stride < 1 or sizes[dim] % stride:
        raise DeclarationError(
            f"{name} has local shape {list(sizes)}, which contradicts its tags partition_dim={dim} and "
            f"partition_stride={stride}"
        )
    step = sizes[dim] // stride
    boxes: list[LocalBox] = []
    for part in range(stride):
        offsets = _with(zero, dim, (part * count + index) * step)
        boxes.append(LocalBox(Box(offsets, _with(sizes, dim, step)), _with(zero, dim, part * step)))
    return _with(sizes, dim, sizes[dim] * count), boxes


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _limit_rows(local: LocalBox, rows: int) -> LocalBox:
    box = local.box
    left = max(0, min(box.sizes[0], rows - box.offsets[0]))
    return local._replace(box=Box(box.offsets, (left, *box.sizes[1:])))
