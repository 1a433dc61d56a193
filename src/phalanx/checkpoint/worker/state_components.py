"""The parts of a worker's state: which leaves they have, how these are sharded, and what becomes of loaded ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.tensor import DTensor

from phalanx.checkpoint.storage.tensor_index import Catalogue, Path, StoredTensor
from phalanx.checkpoint.worker.tree import key_of, keyed, leaves, nested
from phalanx.declare.state_declarations import StateOf
from phalanx.errors import CheckpointMismatch, DeclarationError
from phalanx.weights.planning.boxes import Patch, whole
from phalanx.weights.planning.readers.dtensor import dtensor_patches
from phalanx.weights.planning.readers.megatron_layout import read_megatron
from phalanx.weights.planning.readers.plain import held_as, local_of, named_tensors
from phalanx.weights.planning.shard_manifest import Held
from phalanx.weights.planning.tensors import dtype_named, name_of

__all__ = ["Leaf", "ModelPart", "Part", "StatePart", "Want", "held_of", "identity", "whole_of"]


class Leaf(NamedTuple):
    """One thing to be saved; ``held`` says how a tensor is sharded, where that is known."""

    path: Path
    value: Any
    held: Held | None = None


@dataclass
class Want:
    """What a part takes of what was saved.

    Attributes:
        tensors: local tensors to be written into, by key, and how each is held.
        values: keys of values.
    """

    tensors: dict[str, tuple[torch.Tensor, Held]] = field(
        default_factory=dict[str, tuple[torch.Tensor, Held]]
    )
    values: set[str] = field(default_factory=set[str])

    def tensor(self, key: str, tensor: torch.Tensor, held: Held | None) -> None:
        """Have a tensor filled."""
        local = local_of(tensor.detach())
        self.tensors[key] = (local, whole_of(local) if held is None else held)


class Part(Protocol):
    """A part of a state."""

    name: str

    def offered(self) -> list[Leaf]:
        """What there is to save."""
        ...

    def wanted(self, catalogue: Catalogue, keys: set[str], chosen: Sequence[str] | None = None) -> Want:
        """What to take of a catalogue.

        Args:
            keys: those that concern this rank as far as the catalogue can say.
            chosen: the outermost keys of the state that are loaded; None: all.

        Raises:
            CheckpointMismatch: it does not fit.
        """
        ...

    def apply(self, values: Mapping[str, Any]) -> None:
        """Take over what was loaded: tensors are filled, ``values`` are here by key."""
        ...


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The same for a parameter and what a reader gives of it: its memory."""
    local = local_of(tensor.detach())
    if local.numel() == 0:
        return ("empty", id(tensor))
    return (local.data_ptr(), tuple(local.shape), tuple(local.stride()))


def held_of(name: str, tensor: Any) -> Held | None:
    """How a DTensor is held; None of anything else."""
    if not isinstance(tensor, DTensor):
        return None
    return held_as(name, tensor, tuple(tensor.shape), dtensor_patches(name, tensor))


def whole_of(tensor: torch.Tensor) -> Held:
    """A tensor that is all here."""
    shape = tuple(tensor.shape)
    return Held(name_of(tensor.dtype), shape, (Patch(whole(shape), (0,) * len(shape)),))


def blank(key: str, stored: StoredTensor) -> torch.Tensor:
    """A tensor for one that was saved whole, where there is none yet.

    Raises:
        CheckpointMismatch: it was saved in parts, and nothing says which are this rank's.
    """
    box = whole(stored.shape)
    if any(piece.box != box for piece in stored.pieces):
        raise CheckpointMismatch(
            f"{key} was saved as a sharded tensor, and the state here has no tensor of that name to load it into: make "
            "it before (an optimizer has its state after the first step), or px.register_state(self, model=..., "
            "optimizer=...), which makes it"
        )
    return torch.empty(stored.shape, dtype=dtype_named(stored.dtype))


class StatePart:
    """Whatever has ``state_dict()`` and ``load_state_dict(state)``; "" is a worker as a whole."""

    def __init__(self, name: str, owner: Any) -> None:
        self.name = name
        self._owner = owner
        self._root: Path = (name,) if name else ()
        self._taken: dict[str, tuple[Path, Any]] = {}

    def _now(self) -> dict[str, tuple[Path, Any]]:
        return keyed(leaves(self._owner.state_dict(), self._root))

    def offered(self) -> list[Leaf]:
        return [Leaf(path, value, held_of(key, value)) for key, (path, value) in self._now().items()]

    def wanted(self, catalogue: Catalogue, keys: set[str], chosen: Sequence[str] | None = None) -> Want:
        want, now = Want(), self._now()
        self._taken = {}
        for key, (path, value) in now.items():
            if chosen is not None and path and str(path[0]) not in chosen:
                continue
            if isinstance(value, torch.Tensor) and key not in catalogue.values:
                self._into(want, key, path, value, catalogue)
            elif key in catalogue.values:
                want.values.add(key)
            elif key in catalogue.tensors:  # what is a tensor now may have been none before the first step
                keys = {*keys, key}
        mine = [key for key, path in catalogue.paths.items() if key in keys and self._has(path)]
        for key in mine:
            if key in self._taken or key in want.values:
                continue
            if key in catalogue.values:
                want.values.add(key)
            else:
                made = blank(key, catalogue.tensors[key])
                want.tensor(key, made, None)
                self._taken[key] = (catalogue.paths[key], made)
        for key in want.values:
            self._taken[key] = (catalogue.paths[key], None)
        order = [*(key for key in catalogue.paths if key in self._taken), *self._taken]
        self._taken = {key: self._taken[key] for key in order}  # dicts come back in the order that they had
        return want

    def _has(self, path: Path) -> bool:
        return path[: len(self._root)] == self._root

    def _into(self, want: Want, key: str, path: Path, value: torch.Tensor, catalogue: Catalogue) -> None:
        held, stored = held_of(key, value), catalogue.tensors.get(key)
        if stored is not None and held is None and (_other_form(value, stored) or _is_expanded(value)):
            value = blank(key, stored)  # its owner may take it, or say why not
        want.tensor(key, value, held)
        self._taken[key] = (path, value)

    def apply(self, values: Mapping[str, Any]) -> None:
        skip = len(self._root)
        state = {
            path[skip:]: values.get(key) if key in values else value
            for key, (path, value) in self._taken.items()
        }
        self._taken = {}
        self._owner.load_state_dict(nested(state))


def _other_form(tensor: torch.Tensor, stored: StoredTensor) -> bool:
    return (name_of(tensor.dtype), tuple(tensor.shape)) != (stored.dtype, tuple(stored.shape))


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, so that nothing can be written into it."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


class ModelPart:
    """A module, or tensors by name: what is loaded is written into them."""

    name = "model"

    def __init__(self, state: StateOf) -> None:
        self._state = state
        self._tensors: dict[str, torch.Tensor] = {}

    def tensors(self) -> dict[str, tuple[torch.Tensor, Held | None]]:
        """Local tensors by their names over all ranks, with how they are held where that is known."""
        model, stated = self._state.model, dict(self._state.boxes or {})
        if self._state.megatron is not None:
            reading = read_megatron(model, self._state.megatron)
            held = dict(reading.manifest.items())
            held |= {alias: held[name] for alias, name in reading.manifest.ties}
            return {name: (tensor, held[name]) for name, tensor in reading.tensors.items()}
        named = named_tensors(model)
        unknown = sorted(stated.keys() - named.keys())
        if unknown:
            raise DeclarationError(
                f"px.register_state(boxes=...) states {', '.join(unknown[:5])}, of which the model has no tensors; it "
                f"has {', '.join(sorted(named)[:5])}, ..."
            )
        return {name: (one, self._held(name, one, stated.get(name))) for name, one in named.items()}

    @staticmethod
    def _held(name: str, tensor: torch.Tensor, stated: Any) -> Held | None:
        if stated is None:
            return held_of(name, tensor)
        return held_as(name, tensor, stated.shape, stated.patches(name, tuple(local_of(tensor).shape)))

    def offered(self) -> list[Leaf]:
        return [Leaf(("model", name), one, held) for name, (one, held) in self.tensors().items()]

    def wanted(self, catalogue: Catalogue, keys: set[str], chosen: Sequence[str] | None = None) -> Want:
        want = Want()
        self._tensors = {}
        found = self.tensors()
        saved = {
            identity(tensor)
            for name, (tensor, _) in found.items()
            if key_of(("model", name)) in (catalogue.tensors.keys() | catalogue.values.keys())
        }
        for name, (tensor, held) in found.items():
            key = key_of(("model", name))
            if key not in catalogue.tensors and key not in catalogue.values and identity(tensor) in saved:
                continue  # tied to one that was saved
            if key in catalogue.values and held is None:
                want.values.add(key)
                self._tensors[key] = tensor
            else:
                want.tensor(key, tensor, held)
        return want

    def apply(self, values: Mapping[str, Any]) -> None:
        for key, tensor in self._tensors.items():
            if values[key].shape != tensor.shape:  # copy_ would broadcast, or fail after others were copied
                raise CheckpointMismatch(
                    f"{key} has shape {list(values[key].shape)} where it was saved, and {list(tensor.shape)} here; "
                    "make the model with the same shapes"
                )
        with torch.no_grad():
            for key, tensor in self._tensors.items():
                tensor.detach().copy_(values[key])
        self._tensors = {}
