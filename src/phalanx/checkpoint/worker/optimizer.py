"""An optimizer as a part of a state, by the names of the parameters rather than by their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from phalanx.checkpoint.storage.tensor_index import Catalogue, Path
from phalanx.checkpoint.worker.state_components import Leaf, ModelPart, Want, blank, held_of, identity
from phalanx.checkpoint.worker.tree import key_of, keyed, leaves, nested
from phalanx.declare.state_declarations import StateOf
from phalanx.errors import CheckpointMismatch
from phalanx.weights.planning.readers.plain import local_of
from phalanx.weights.planning.shard_manifest import Held
from phalanx.weights.planning.tensors import dtype_named, name_of

__all__ = ["OptimizerPart"]

_STATE: Path = ("optimizer", "state")
_GROUPS: Path = ("optimizer", "groups")


class OptimizerPart:
    """Moments are sharded as their parameter is; a load makes those that are not there yet."""

    name = "optimizer"

    def __init__(self, optimizer: torch.optim.Optimizer, state: StateOf, model: ModelPart | None) -> None:
        self._optimizer = optimizer
        self._stated = state
        self._model = model
        self._taken: dict[str, tuple[Path, Any]] = {}

    def _parameters(self) -> dict[str, tuple[torch.Tensor, Held | None, Mapping[str, Any]]]:
        """Parameters by name, with how they are held and the group that each is in."""
        known: dict[tuple[Any, ...], tuple[str, Held | None]] = {}
        for name, (tensor, held) in ({} if self._model is None else self._model.tensors()).items():
            known.setdefault(identity(tensor), (name, held))
        found: dict[str, tuple[torch.Tensor, Held | None, Mapping[str, Any]]] = {}
        for number, group in enumerate(self._optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                name, held = known.get(
                    identity(parameter), (f"group {number}.{index}", held_of("", parameter))
                )
                found[name] = (parameter, held, group)
        return found

    def offered(self) -> list[Leaf]:
        found: list[Leaf] = []
        for name, (parameter, held, _) in self._parameters().items():
            for path, value in leaves(self._optimizer.state.get(parameter, {}), (*_STATE, name)):
                found.append(Leaf(path, value, _held(path, value, parameter, held)))
        for number, group in enumerate(self._optimizer.param_groups):
            found += [
                Leaf((*_GROUPS, ("list", number), str(key)), value)
                for key, value in group.items()
                if key != "params"
            ]
        return found

    def wanted(self, catalogue: Catalogue, keys: set[str], chosen: Sequence[str] | None = None) -> Want:
        want = Want()
        self._taken = {}
        saved: dict[str, list[tuple[str, Path]]] = {}
        groups = 0
        for key, path in catalogue.paths.items():
            if path[:2] == _STATE:
                saved.setdefault(str(path[2]), []).append((key, path))
            elif path[:2] == _GROUPS:
                groups = max(groups, int(path[2][1]) + 1)  # type: ignore[index]
                want.values |= {key} & catalogue.values.keys()
                if key in catalogue.tensors:
                    self._whole(want, key, path, catalogue)
        if groups != len(self._optimizer.param_groups):
            raise CheckpointMismatch(
                f"the optimizer that was saved has {groups} groups of parameters, and the one here "
                f"{len(self._optimizer.param_groups)}; make it with the same groups"
            )
        for name, (parameter, held, group) in self._parameters().items():
            if len({path == (*_STATE, name) for _, path in saved.get(name, [])}) > 1:
                raise CheckpointMismatch(
                    f"of {name}, some ranks' optimizers had a state when they were saved, and others had made no step; "
                    "step on all ranks, or load the parts without the optimizer (parts=[...])"
                )
            for key, path in saved.get(name, []):
                self._leaf(want, key, path, catalogue, parameter, held, group)
        return want

    def _leaf(
        self,
        want: Want,
        key: str,
        path: Path,
        catalogue: Catalogue,
        parameter: torch.Tensor,
        held: Held | None,
        group: Mapping[str, Any],
    ) -> None:
        stored = catalogue.tensors.get(key)
        if stored is None:
            want.values.add(key)
            self._taken[key] = (path, None)
            return
        now = keyed(leaves(self._optimizer.state.get(parameter, {}), (*_STATE, path[2]))).get(key)
        like = tuple(parameter.shape) if held is None else tuple(held.shape)
        if now is not None and isinstance(now[1], torch.Tensor):
            tensor = now[1]
        elif stored.shape and tuple(stored.shape) == like:
            tensor = torch.zeros_like(parameter.detach(), dtype=dtype_named(stored.dtype))
        else:
            tensor = _beside(blank(key, stored), path, parameter, group)
        want.tensor(key, tensor, _held(path, tensor, parameter, held))
        self._taken[key] = (path, tensor)

    def _whole(self, want: Want, key: str, path: Path, catalogue: Catalogue) -> None:
        tensor = blank(key, catalogue.tensors[key])
        want.tensor(key, tensor, None)
        self._taken[key] = (path, tensor)

    def apply(self, values: Mapping[str, Any]) -> None:
        by_name: dict[str, dict[Path, Any]] = {}
        for key, (path, value) in self._taken.items():
            if path[:2] == _STATE:
                by_name.setdefault(str(path[2]), {})[path[3:]] = values.get(key, value)
        for name, (parameter, _, _) in self._parameters().items():
            if name in by_name:
                self._optimizer.state[parameter] = nested(by_name[name])
            else:  # it had made no step yet: what later ones left is not of this state
                self._optimizer.state.pop(parameter, None)
        for number, group in enumerate(self._optimizer.param_groups):
            for key in [key for key in values if key.startswith(key_of((*_GROUPS, number)) + ".")]:
                group[key.removeprefix(key_of((*_GROUPS, number)) + ".")] = values[key]
            for path, value in list(self._taken.values()):
                if path[:3] == (*_GROUPS, ("list", number)):
                    group[str(path[3])] = value
        self._taken = {}


def _held(path: Path, value: Any, parameter: torch.Tensor, held: Held | None) -> Held | None:
    """As the parameter, where a plain tensor has its local shape."""
    if not isinstance(value, torch.Tensor):
        return None
    own = held_of(key_of(path), value)
    local = local_of(parameter.detach())
    if own is None and held is not None and value.dim() and value.shape == local.shape:
        return Held(name_of(value.dtype), held.shape, held.patches)
    return own


def _beside(
    tensor: torch.Tensor, path: Path, parameter: torch.Tensor, group: Mapping[str, Any]
) -> torch.Tensor:
    """Where torch keeps it: counts of steps in host memory, unless the optimizer runs on the accelerator alone."""
    if path[-1] == "step" and not (group.get("capturable") or group.get("fused")):
        return tensor
    return tensor.to(parameter.device)
