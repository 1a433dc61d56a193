"""The layout of a rank's tensors: plain tensors, DTensors, tensors with stated boxes, and Megatron's parameters.

The boxes of a DTensor are computed from mesh and placements and compared with the local shape. Torch's
``compute_local_shape_and_global_offset``, which DCP uses too, is silently wrong for uneven dimensions under FSDP over
tensor parallelism if a rank's chunk is missing, and for strided shards without the shard that they stride over.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from phalanx.declare.weight_declarations import Accepted, Published
from phalanx.errors import DeclarationError, WeightsMismatch
from phalanx.weights.boxes import Box, LocalBox, complete, local_boxes, meet, strided_chunk, volume, whole
from phalanx.weights.manifest import DTYPE_BYTES, HeldTensor, Manifest, Tensors, name_of
from phalanx.wire.value import Dims

_LAYER = re.compile(r"(?<![^.])layers\.(\d+)(?![^.])")
#: The number of an expert: in a list of experts, or in a layer that groups all experts.
_EXPERT = re.compile(
    r"(?<![^.])(local_experts\.|experts\.linear_fc[12]\.(?:\w+\.)*(?:weight|bias))(\d+)(?![^.])"
)
_WRAPPED = "_checkpoint_wrapped_module."  # by torch's checkpoint_wrapper; not in names of state dicts
_VOCABULARY = ("word_embeddings.weight", "output_layer.weight", "output_layer.bias")

TensorBoxes = tuple[Dims, Sequence[LocalBox]]
"""The global shape of a tensor, and its boxes on a rank."""


@dataclass(frozen=True)
class ShardSpec:
    """The layout of a tensor that is sharded by hand: its global shape and the boxes on this rank.

    Args:
        shape: shape of the global tensor.
        boxes: (offsets, sizes) of each box. A single box is the complete local tensor. Several boxes are stacked
            along ``dim`` of it.
        dim: dimension along which several boxes are stacked in the local tensor.
    """

    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    dim: int = 0

    def local_boxes(self, name: str, local: Dims) -> tuple[LocalBox, ...]:
        """Return the boxes with their positions in a local tensor of shape ``local``.

        Raises:
            DeclarationError: if the boxes do not fill the local tensor.
        """
        boxes: list[LocalBox] = []
        end = 0
        for offsets, sizes in self.boxes:
            at = tuple(end if dim == self.dim else 0 for dim in range(len(sizes)))
            boxes.append(LocalBox(Box(tuple(offsets), tuple(sizes)), at))
            end += sizes[self.dim] if sizes else 0
        stacked = {
            tuple(end if dim == self.dim else size for dim, size in enumerate(box.sizes)) for box, _ in boxes
        }
        is_filled = stacked == {tuple(local)} or (not boxes and 0 in local)
        if not is_filled or any(len(part) != len(self.shape) for box, _ in boxes for part in box):
            raise DeclarationError(
                f"{name}: the stated boxes {[str(box) for box, _ in boxes]} do not make up the local tensor of shape "
                f"{list(local)}; state boxes of the global tensor of shape {list(self.shape)} that fill it, stacked "
                f"along dim {self.dim}"
            )
        return tuple(boxes)


class LocalLayout(NamedTuple):
    """Layouts and local tensors of a rank by name. ``ties`` maps a name to another name of the same storage."""

    held: dict[str, HeldTensor]
    ties: dict[str, str]
    tensors: dict[str, torch.Tensor]

    @property
    def manifest(self) -> Manifest:
        """Manifest of the layout, for other processes."""
        return Manifest.of(self.held, self.ties)

    @property
    def device(self) -> torch.device:
        """The CUDA device that has all tensors with elements; the CPU if no single device has them all."""
        devices = {tensor.device for tensor in self.tensors.values() if tensor.numel()}
        return devices.pop() if [device.type for device in devices] == ["cuda"] else torch.device("cpu")


def model_of(declared: Published | Accepted) -> Any:
    """Return the declared module or mapping, or the result of the declared function."""
    model = declared.model
    if isinstance(model, torch.nn.Module | Mapping) or not callable(model):
        return model
    return model()


def read_layout(declared: Published | Accepted) -> LocalLayout:
    """Return the layout of the declared tensors on this rank.

    Raises:
        DeclarationError: if a tensor cannot be read; the message names it.
    """
    model = model_of(declared)
    if declared.megatron is not None:
        return read_megatron(model, declared.megatron)
    return read_tensors(model, declared.boxes)


def current_tensors(declared: Published | Accepted, planned: LocalLayout) -> Tensors:
    """Return the current tensors, which must have the layouts of the plan.

    Raises:
        WeightsMismatch: if a layout changed, a tensor is missing, tied names have different values, or a target has a
            tensor that no version would update.
        DeclarationError: as for :func:`read_layout`.
    """
    held, _, tensors = read_layout(declared)
    added = sorted(held.keys() - planned.held.keys()) if isinstance(declared, Accepted) else []
    changed = [name for name, one in planned.held.items() if held.get(name) != one]
    # Only one name of a tie is sent: the other must have the same values.
    ties = ((alias, tensors[alias], tensors[name]) for alias, name in planned.ties.items())
    untied = (a for a, one, two in ties if one.data_ptr() != two.data_ptr() and not torch.equal(one, two))
    if odd := added + changed or list(untied):
        raise WeightsMismatch(
            f"{len(odd)} tensors do not match the plan of this sync: {', '.join(odd[:5])}; sync again, "
            "the next sync makes a new plan"
        )
    return tensors


def named_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a module or mapping by name: tied tensors under each name, persistent buffers included.

    Parameters that FSDP2 has gathered are resharded.

    Raises:
        DeclarationError: if ``model`` is neither a module nor a mapping of names to tensors.
    """
    if isinstance(model, torch.nn.Module):
        reshard(model)
        tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        kept = set(model.state_dict(keep_vars=True)) if any(True for _ in model.buffers()) else set[str]()
        buffers = model.named_buffers(remove_duplicate=False)
        tensors.update(one for one in buffers if one[0].replace(_WRAPPED, "") in kept)
        return tensors
    if not isinstance(model, Mapping):
        raise DeclarationError(
            f"weights are an nn.Module or a mapping of names to tensors, not {type(model).__name__}"
        )
    wrong = {
        name: type(one).__name__
        for name, one in model.items()
        if not (isinstance(name, str) and isinstance(one, torch.Tensor))
    }
    if wrong:
        raise DeclarationError(
            f"weights are a mapping of names (str) to tensors; {wrong} are not tensors by name"
        )
    return dict(model)


def reshard(model: torch.nn.Module) -> None:
    """Reshard the parameters that FSDP2 has gathered, also after a pass that raised.

    ``FSDPModule.reshard`` leaves such parameters gathered. FSDP's hook of ``state_dict`` does not. The hook is called
    alone, since a model may override ``state_dict``.
    """
    for module in model.modules():
        hooks: dict[int, Any] = getattr(module, "_state_dict_pre_hooks", {})
        for hook in hooks.values():
            if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"):
                hook(module, "", True)


def read_tensors(model: Any, boxes: Mapping[str, ShardSpec] | None = None) -> LocalLayout:
    """Read the layout of plain, replicated and distributed tensors. Two names of a storage become a tie.

    Args:
        model: a module, or tensors by name. A plain tensor is complete, and equal on all ranks.
        boxes: stated layouts by name.

    Raises:
        DeclarationError: if a tensor cannot be read; the message names it.
    """
    named = stated_tensors(model, boxes, "boxes=")
    return make_layout(
        {name: (tensor, boxes_of(name, tensor, spec)) for name, (tensor, spec) in named.items()}
    )


def stated_tensors(
    model: Any, boxes: Mapping[str, ShardSpec] | None, title: str
) -> dict[str, tuple[torch.Tensor, ShardSpec | None]]:
    """Return the tensors of a module or mapping by name, each with its stated layout, if any.

    Raises:
        DeclarationError: if ``boxes`` has a name without a tensor. The message calls the argument ``title``.
    """
    tensors, stated = named_tensors(model), dict(boxes or {})
    unknown = sorted(stated.keys() - tensors.keys())
    if unknown:
        raise DeclarationError(
            f"{title} names tensors that do not exist: {', '.join(unknown[:5])}; expected some of "
            f"{', '.join(sorted(tensors)[:5])}, ..."
        )
    return {name: (tensor, stated.get(name)) for name, tensor in tensors.items()}


def boxes_of(name: str, tensor: torch.Tensor, spec: ShardSpec | None) -> TensorBoxes:
    """Return the global shape and the boxes of a tensor: as stated, of a ``DTensor``, or of a complete tensor."""
    shape = tuple(tensor.shape)
    if spec is not None:
        return spec.shape, spec.local_boxes(name, tuple(local_of(tensor).shape))
    return shape, dtensor_boxes(name, tensor) if isinstance(tensor, DTensor) else complete(shape)


def filled(boxes: Iterable[LocalBox]) -> tuple[LocalBox, ...]:
    """Return the boxes that are not empty."""
    return tuple(one for one in boxes if volume(one.box))


def make_layout(found: Mapping[str, tuple[torch.Tensor, TensorBoxes]]) -> LocalLayout:
    """Return the layout of tensors with their boxes, without empty boxes, with ties found by their storage.

    Raises:
        DeclarationError: if the type or layout of a tensor cannot be sent.
    """
    held: dict[str, HeldTensor] = {}
    first: dict[tuple[Any, ...], str] = {}
    ties: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, (placed, (shape, boxes)) in found.items():
        tensor = tensors[name] = local_of(placed).detach()
        dtype = name_of(tensor.dtype)
        if dtype not in DTYPE_BYTES or tensor.layout is not torch.strided:
            what, types = f"{name} has type {dtype} and layout {tensor.layout}", ", ".join(DTYPE_BYTES)
            raise DeclarationError(f"{what}; weights can be dense tensors (torch.strided) of {types}")
        held[name] = HeldTensor(dtype, tuple(shape), filled(boxes))
        if tensor.numel() and not tensor.is_meta:
            storage = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), held[name])
            if (twin := first.setdefault(storage, name)) != name:
                ties[name] = twin
    return LocalLayout(held, ties, tensors)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rank's part of a tensor, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class MeshCut(NamedTuple):
    """A mesh axis that cuts a tensor dimension: this rank has part ``part`` of ``parts``.

    ``factor`` is the split factor of a strided shard: the number of parts into which later axes cut the dimension
    first. It is 1 for a plain shard.
    """

    dim: int
    part: int
    parts: int
    factor: int = 1


def dtensor_boxes(name: str, tensor: DTensor) -> tuple[LocalBox, ...]:
    """Return the boxes of ``tensor`` on this rank; none if the rank is outside of the mesh.

    Raises:
        DeclarationError: if a placement is Partial or unknown, or placements and local tensor contradict each other.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    cuts: list[MeshCut] = []
    placements = cast("Sequence[Any]", tensor.placements)
    for index, count, placement in zip(coordinate, mesh.shape, placements, strict=True):
        if isinstance(placement, Shard) or type(placement).__name__ == "_StridedShard":
            cuts.append(MeshCut(placement.dim, index, count, getattr(placement, "split_factor", 1)))
        elif not isinstance(placement, Replicate):
            raise DeclarationError(
                f"{name} is placed as {placement}; weights can be published if placements are Shard and Replicate: "
                "redistribute it first"
            )
    return placed_boxes(name, tuple(tensor.shape), cuts, tuple(tensor.to_local().shape))


def placed_boxes(
    name: str, shape: Sequence[int], cuts: Sequence[MeshCut], local: Sequence[int]
) -> tuple[LocalBox, ...]:
    """Return the boxes that remain of a tensor of ``shape`` after ``cuts``, which are in the order of the mesh axes.

    A strided shard means that a later axis cuts first: FSDP over tensor parallelism. If this does not lead to the
    ``local`` shape, the placement is read literally, as chunks within chunks.

    Raises:
        DeclarationError: if neither order leads to the local shape.
    """
    for order in (_reordered, list):
        runs: list[list[range]] = []
        for dim, size in enumerate(shape):
            left = [range(size)] if size else []
            for cut in order([cut for cut in cuts if cut.dim == dim]):
                left = strided_chunk(left, cut.part, cut.parts, cut.factor)
            runs.append(left)
        sizes = [sum(map(len, dim)) for dim in runs]
        if math.prod(sizes) == 0 and math.prod(local) == 0:
            return ()
        if sizes == list(local):
            return local_boxes(runs)
    placed = ", ".join(f"dim {cut.dim}: part {cut.part} of {cut.parts}" for cut in cuts)
    raise DeclarationError(
        f"{name}: its placements ({placed}) of global shape {list(shape)} do not lead to the local shape {list(local)} "
        "of this rank; state its boxes instead"
    )


def _reordered(cuts: Sequence[MeshCut]) -> list[MeshCut]:
    """Return the cuts with each strided shard moved behind the axes that it strides over."""
    order: list[MeshCut] = []
    for position in reversed(range(len(cuts))):
        cut = cuts[position]
        if cut.factor > 1 and cut.factor == math.prod(other.parts for other in cuts[position + 1 :]):
            order.append(cut._replace(factor=1))
        else:
            order.insert(0, cut)
    return order


@dataclass(frozen=True)
class MegatronRank:
    """The position of a rank in Megatron's parallel state, as far as its parameters depend on it.

    Tags of Megatron's parameters describe how tensor parallelism cuts them. This class adds ranks, layers of the
    pipeline stage, experts, and the rows of the vocabulary without padding. Megatron is not imported.

    Args:
        tp, tp_size: rank and size of tensor parallelism.
        expert_tp, expert_tp_size: rank and size for experts; None uses ``tp`` and ``tp_size``.
        first_layer: global number of the stage's ``layers.0`` (Megatron counts from 0 on every stage).
        first_expert: global number of the rank's ``local_experts.0``, or of the first of its grouped experts.
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
        experts = len({found[2] for name, _ in model.named_parameters() if (found := _EXPERT.search(name))})
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
        """Return the name across all stages and expert ranks of the parameter ``local`` of this rank."""
        name = _LAYER.sub(lambda match: f"layers.{int(match[1]) + self.first_layer}", local)
        return _EXPERT.sub(lambda match: f"{match[1]}{int(match[2]) + self.first_expert}", name)

    def cut(self, name: str) -> tuple[int, int]:
        """Return rank and size of the tensor parallelism that cuts the parameter ``name``."""
        if _EXPERT.search(name) and self.expert_tp_size is not None:
            return self.expert_tp or 0, self.expert_tp_size
        return self.tp, self.tp_size


def _first_layer(model: torch.nn.Module) -> int:
    """Return the global number of ``layers.0``, from Megatron's ``layer_number``, which counts from 1."""
    offsets: set[int] = set()
    for path, module in model.named_modules():
        *_, parent, number = ("", *path.split("."))
        layer = getattr(module, "layer_number", None)
        if parent == "layers" and number.isdigit() and isinstance(layer, int):
            offsets.add(layer - 1 - int(number))
    if len(offsets) > 1:
        raise DeclarationError(
            f"the layers of this {type(model).__name__} begin at {sorted(offsets)}: their global numbers are not "
            "consecutive; publish such parts separately, each with px.weights.MegatronRank(first_layer=...)"
        )
    return offsets.pop() if offsets else 0


def read_megatron(model: Any, rank: MegatronRank) -> LocalLayout:
    """Read the layout of a Megatron module, or of a mapping from names of this stage to parameters.

    Raises:
        DeclarationError: if tags and shapes contradict each other, or names are ambiguous.
    """
    found: dict[str, tuple[torch.Tensor, TensorBoxes]] = {}
    for local_name, tensor in named_tensors(model).items():
        if "_extra_state" in local_name:
            continue
        name = rank.name(local_name)
        if not _EXPERT.search(name) and not getattr(tensor, "allreduce", True):  # Megatron's mark of experts
            raise DeclarationError(
                f"{name} belongs to different experts on each expert-parallel rank; expected a name with "
                "local_experts.N or, of grouped experts, linear_fc1.weightN"
            )
        if name in found:
            raise DeclarationError(f"two parameters are named {name} once layers are counted globally")
        shape, boxes = _tagged_boxes(name, tensor, *rank.cut(name))
        if rank.vocabulary is not None and name.endswith(_VOCABULARY):
            shape = (rank.vocabulary, *shape[1:])
            parts = [(meet(box, whole(shape)), at) for box, at in boxes]
            boxes = [LocalBox(part, at) for part, at in parts if part is not None]
        found[name] = tensor, (shape, boxes)
    return make_layout(found)


def _tagged_boxes(name: str, tensor: torch.Tensor, index: int, count: int) -> TensorBoxes:
    """Return global shape and boxes. A stride of 2 means two boxes: [gate; up] of a gated MLP on each rank."""
    sizes = tuple(tensor.shape)
    if not getattr(tensor, "tensor_model_parallel", False) or count == 1:
        return sizes, complete(sizes)
    dim = int(getattr(tensor, "partition_dim", 0))
    stride = int(getattr(tensor, "partition_stride", 1))
    if not 0 <= dim < len(sizes) or stride < 1 or sizes[dim] % stride:
        raise DeclarationError(
            f"{name} has local shape {list(sizes)}, which contradicts its tags partition_dim={dim} and "
            f"partition_stride={stride}"
        )
    shape = (*sizes[:dim], sizes[dim] * count, *sizes[dim + 1 :])
    return shape, placed_boxes(name, shape, [MeshCut(dim, index, count, stride)], sizes)
