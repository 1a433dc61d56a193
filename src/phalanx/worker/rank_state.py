"""Conversion of a worker's state to leaves by key, and back: model, optimizer, other components, random generators.

Saves and snapshots share this module. It does not use files.
"""

from __future__ import annotations

import random
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from phalanx.declare.state_declarations import StateOf, declared_states, stateful
from phalanx.errors import CheckpointError, CheckpointMismatch
from phalanx.weights.boxes import LocalBox, cut
from phalanx.weights.local_layout import ShardSpec, boxes_of, filled, local_of, read_megatron, stated_tensors

if TYPE_CHECKING:  # drivers plan saves without a runtime
    from phalanx.worker.worker_runtime import WorkerRuntime

Path = tuple[str | int | tuple[str, int], ...]
"""Path of a leaf in a state: keys of dicts; ("list", index) and ("tuple", index) only in states of format 1."""

StateLeaf = tuple[Path, Any]
"""A leaf of a state with its path: a LocalTensor, or a value that is pickled."""

GENERATORS = "rng"
"""Outermost key of a rank's random generators."""
_STATE: Path = ("optimizer", "state")
_GROUPS: Path = ("optimizer", "groups")


@dataclass(frozen=True)
class LocalTensor:
    """A tensor of this rank and its boxes of the global tensor.

    Attributes:
        local: the rank's own memory.
        shape: shape of the global tensor.
        patches: boxes of the global tensor, each with its place in ``local``.
        value: the tensor of the state: ``local`` itself, or such as the ``DTensor`` around it.
        declared: True if the layout was declared; else the ranks compare their values.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    patches: tuple[LocalBox, ...]
    value: torch.Tensor
    declared: bool = True

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, spec: ShardSpec | None = None) -> LocalTensor:
        """Return a tensor with the layout that ``spec``, or else its type (``DTensor``), declares, if any."""
        declared = spec is not None or isinstance(tensor, DTensor)
        shape, boxes = boxes_of(name, tensor, spec)
        patches = filled(boxes) if declared else tuple(boxes)
        return cls(local_of(tensor.detach()), tuple(shape), patches, tensor, declared)

    def check(self, key: str) -> None:
        """Raise ``CheckpointError`` if the tensor is sparse or on the meta device."""
        if self.local.is_meta or self.local.layout is not torch.strided:
            raise CheckpointError(
                f"{key} of the state is a tensor of layout {self.local.layout} on device {self.local.device}, which "
                "cannot be saved or loaded; give it dense, or omit it"
            )

    def box_at(self, offsets: Sequence[int]) -> torch.Tensor:
        """Return the view of the box that begins at ``offsets`` of the global tensor."""
        patch = next(patch for patch in self.patches if patch.box.offsets == tuple(offsets))
        return cut(self.local, patch.at, patch.box.sizes)

    def like(self, parameter: LocalTensor) -> LocalTensor:
        """Return the tensor with the layout of its parameter, if it has the same local shape and no declared layout."""
        if self.declared or not self.local.dim() or self.local.shape != parameter.local.shape:
            return self
        return replace(parameter, local=self.local, value=self.value)


class SavedLeaf(NamedTuple):
    """A leaf that was saved.

    Attributes:
        path: its path in the state.
        dtype: type of the tensor; None for a pickled value.
        shape: shape of the global tensor.
        sharded: True if it was saved in several boxes.
        ranks: the ranks that had it; None: all.
    """

    path: Path
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    sharded: bool = False
    ranks: frozenset[int] | None = None

    @property
    def part(self) -> str:
        """Outermost key of the state; "" for a value that is the complete state."""
        return str(self.path[0]) if self.path else ""


class RankState:
    """The state of a role of a rank.

    Raises:
        CheckpointError: if the worker has no state.
    """

    def __init__(self, worker: Any, declared: StateOf | None, device: Any) -> None:
        if not has_state(worker, declared):
            raise CheckpointError(
                f"{type(worker).__qualname__} has nothing to save: give it state_dict() and load_state_dict(state), or "
                "call px.register_state(self, model=..., optimizer=...) in its constructor"
            )
        self._components = _components(worker, declared, device)
        self._planned: list[tuple[_Component, Targets]] = []

    @property
    def names(self) -> list[str]:
        """Outermost keys of the components; "" for a worker without declared components."""
        return [component.name for component in self._components]

    def leaves(self) -> dict[str, StateLeaf]:
        """Return each leaf with its path, by key.

        Raises:
            CheckpointError: if two leaves have the same key.
        """
        found: dict[str, StateLeaf] = {}
        for component in self._components:
            for path, value in component.leaves():
                key = key_of(path)
                if key in found:
                    raise CheckpointError(
                        f"two values of the state are named {key}: {found[key][0]} and {path}; rename a key"
                    )
                found[key] = (path, value)
        return found

    def targets(
        self, saved: Mapping[str, SavedLeaf], where: str, parts: Sequence[str] | None = None
    ) -> dict[str, LocalTensor | None]:
        """Plan a load: return the tensors to fill and the values to read (None), by key. Change nothing.

        Args:
            saved: saved leaves for this rank, by key.
            where: name of the save or snapshot, for errors.
            parts: outermost keys to load; None: all.

        Raises:
            CheckpointMismatch: if the leaves do not fit; the error names them.
        """
        names = sorted({leaf.part for leaf in saved.values() if leaf.path})
        self._planned = []
        for component in self._components:
            if component.name and parts is not None and component.name not in parts:
                continue
            if component.name and component.name not in names and any(component.leaves()):
                advice = [name for name in names if name != GENERATORS]
                raise CheckpointMismatch(
                    f"{where} has no part {component.name!r}, which the worker has; it has {', '.join(names)}. "
                    f"Load those alone: parts={advice!r}"
                )
            self._planned.append((component, component.targets(saved)))
        found = {key: target for _, planned in self._planned for key, (_, target) in planned.items()}
        _check_forms(saved, found)
        return found

    def apply(self, values: Mapping[str, Any]) -> None:
        """Load the values into the components of the planned load, once its target tensors are filled."""
        planned, self._planned = self._planned, []
        for component, targets in planned:
            leaves = targets.items()
            component.apply({path: target.value if target else values[key] for key, (path, target) in leaves})


def has_state(worker: Any, declared: StateOf | None) -> bool:
    """Return whether a worker declares its state, or has ``state_dict()`` and ``load_state_dict(state)``."""
    return declared is not None or all(
        callable(getattr(worker, name, None)) for name in ("state_dict", "load_state_dict")
    )


def states_of(runtime: WorkerRuntime, role: str = "", *, rng: bool = True) -> dict[str, RankState]:
    """Return the state of ``role``, or of each role with a state. Warn of roles without one.

    Without ``rng``, the random generators are left out.

    Raises:
        CheckpointError: if no role has a state.
    """
    workers, found = runtime.instances, declared_states(runtime.context).items()
    declared = {name: replace(one, rng=one.rng and rng) for name, one in found}
    stateful_roles = [name for name, worker in workers.items() if has_state(worker, declared.get(name))]
    names = [role] if role in workers else stateful_roles
    if names and not role and len(names) < len(workers):
        left = ", ".join(name for name in workers if name not in names)
        warnings.warn(
            f"no state is kept of {left}: a role that changes calls px.register_state in its constructor, and one that "
            "does not change px.register_state(self, rng=False)",
            stacklevel=2,
        )
    states = {
        name: RankState(workers[name], declared.get(name), runtime.device)
        for name in names or list(workers)[:1]
    }
    return {name: state for name, state in states.items() if state.names} or states


def key_of(path: Path) -> str:
    """Return a path as torch's distributed checkpoint writes it: ``optimizer.state.w.step``."""
    return ".".join(str(step[1]) if isinstance(step, tuple) else str(step) for step in path)


def generators_of(device: Any) -> Any:
    """Return an object with the random state of torch, of its accelerator ``device``, of numpy and of ``random``."""
    found: dict[str, Any] = {"torch": torch.default_generator, "numpy": np.random, "random": random}
    module: Any = torch.get_device_module(device)
    if hasattr(module, "get_rng_state"):  # that of the CPU has none
        get, put = partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)
        found["accelerator"] = SimpleNamespace(get_state=get, set_state=put)
    return stateful(found)


def _components(worker: Any, declared: StateOf | None, device: Any) -> list[_Component]:
    if declared is None:
        return [_Component("", worker)]
    model = None if declared.model is None else _Model(declared)
    found: list[_Component] = [] if model is None else [model]
    if isinstance(declared.optimizer, torch.optim.Optimizer) and _has_own_state(declared.optimizer):
        found.append(_Optimizer(declared.optimizer, model))
    elif declared.optimizer is not None:
        found.append(_Component("optimizer", stateful(declared.optimizer)))
    found += [_Component(name, stateful(part)) for name, part in declared.others.items()]
    return [*found, _Component(GENERATORS, generators_of(device))] if declared.rng else found


def _has_own_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer holds the state of its parameters itself, not in an inner one as torch's ZeRO."""
    inner = (one for one in vars(optimizer).values() if isinstance(one, torch.optim.Optimizer))
    elsewhere = [one for one in inner if one.state is not optimizer.state and _ids(one) & _ids(optimizer)]
    return not elsewhere or type(optimizer).state_dict is torch.optim.Optimizer.state_dict


def _ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


Targets = dict[str, tuple[Path, LocalTensor | None]]
"""By key: the path of a leaf, and the tensor to fill, or None for a value to read."""


class _Component:
    """An object with ``state_dict()`` and ``load_state_dict(state)``; the name "" is a worker without components."""

    def __init__(self, name: str, owner: Any) -> None:
        self.name = name
        self._owner = owner
        self._root: Path = (name,) if name else ()

    def leaves(self) -> Iterator[StateLeaf]:
        """Yield each leaf with its path: a LocalTensor, or a value that is pickled."""
        return _flat(self._owner.state_dict(), self._root)

    def targets(self, saved: Mapping[str, SavedLeaf]) -> Targets:
        """Return the targets of this component's leaves, including tensors that were not saved. Change nothing."""
        current = {key_of(path): (path, value) for path, value in self.leaves()}
        found: Targets = {}
        for key, leaf in saved.items():
            if leaf.path[: len(self._root)] == self._root:
                path, value = current.get(key, (leaf.path, None))
                found[key] = path, _target(key, leaf, value)
        # In a load of parts, a worker without declared components has leaves that are not requested. A generator that
        # was not saved, such as an accelerator's, keeps its state.
        chosen = {leaf.path[0] for leaf in saved.values() if leaf.path} - {GENERATORS}
        values = {leaf.path for leaf in saved.values()}
        for key, (path, value) in current.items():
            missing = isinstance(value, LocalTensor) and key not in saved and 0 not in value.shape
            # A dict of tensors may have been saved as the value {}, such as an optimizer's state before its first step.
            missing = missing and values.isdisjoint(path[:end] for end in range(len(path)))
            if missing and (not path or path[0] in chosen):
                found[key] = path, value
        return found

    def apply(self, leaves: Mapping[Path, Any]) -> None:
        """Load the leaves, by path, into the object."""
        self._owner.load_state_dict(_nested({path[len(self._root) :]: one for path, one in leaves.items()}))


class _Model(_Component):
    """A module, or tensors by name. A load writes into the tensors."""

    def __init__(self, declared: StateOf) -> None:
        super().__init__("model", declared)

    def tensors(self) -> dict[str, LocalTensor]:
        """Return the tensors of this rank by their names over all ranks."""
        declared: StateOf = self._owner
        if declared.megatron is not None:
            held, _, tensors = read_megatron(declared.model, declared.megatron)
            return {
                name: LocalTensor(tensor, held[name].shape, held[name].boxes, tensor)
                for name, tensor in tensors.items()
            }
        named = stated_tensors(declared.model, declared.boxes, "px.register_state(boxes=...)")
        return {name: LocalTensor.of(name, *tensor) for name, tensor in named.items()}

    def leaves(self) -> Iterator[StateLeaf]:
        return ((("model", name), tensor) for name, tensor in self.tensors().items())

    def targets(self, saved: Mapping[str, SavedLeaf]) -> Targets:
        tensors = {key_of(path): (path, tensor) for path, tensor in self.leaves()}
        present = {_identity(tensor.value) for key, (_, tensor) in tensors.items() if key in saved}
        # A tensor that shares the storage of a saved tensor is filled with it.
        return {
            key: (path, tensor)
            for key, (path, tensor) in tensors.items()
            if key in saved or not (0 in tensor.shape or _identity(tensor.value) in present)
        }

    def apply(self, leaves: Mapping[Path, Any]) -> None:
        """Do nothing: the tensors are filled."""


_Parameters = dict[str, tuple[torch.Tensor, LocalTensor, Mapping[str, Any]]]
"""Parameters by name, each with its layout and its parameter group."""


class _Optimizer(_Component):
    """An optimizer, saved by the names of its parameters. A load creates state that is not there yet.

    ``get_state_dict`` of torch's distributed checkpoint is not used: it steps an optimizer without state, which
    changes the training. Nor is the optimizer's own ``load_state_dict``, which casts state to the type of parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: _Model | None) -> None:
        super().__init__("optimizer", optimizer)
        self._model = model

    def _parameters(self) -> _Parameters:
        """Return the parameters of the optimizer."""
        known: dict[tuple[Any, ...], tuple[str, LocalTensor]] = {}
        for name, tensor in ({} if self._model is None else self._model.tensors()).items():
            known.setdefault(_identity(tensor.value), (name, tensor))
        found: _Parameters = {}
        for number, group in enumerate(self._owner.param_groups):
            for index, parameter in enumerate(group["params"]):
                own = _identity(parameter)
                name, tensor = known.get(own) or (f"group {number}.{index}", LocalTensor.of("", parameter))
                found[name] = (parameter, tensor, group)
        return found

    def leaves(self) -> Iterator[StateLeaf]:
        other = [key for key in self._owner.state if not isinstance(key, torch.Tensor)]
        if other:
            raise CheckpointError(
                f"{type(self._owner).__qualname__} is saved by the names of its parameters, and has the state "
                f"{other[0]!r}, which is of none; register it as another part, which its own state_dict() saves: "
                "px.register_state(self, model=..., other=<the optimizer>)"
            )
        for name, (parameter, layout, _) in self._parameters().items():
            # An empty dict before the first step.
            for path, value in _flat(self._owner.state.get(parameter, {}), (*_STATE, name)):
                yield path, value.like(layout) if isinstance(value, LocalTensor) else value
        for number, group in enumerate(self._owner.param_groups):
            options = {key: value for key, value in group.items() if key != "params"}
            if not options:
                yield (*_GROUPS, number), {}
            for key, value in options.items():  # values such as dicts are pickled as they are
                is_tensor = isinstance(value, torch.Tensor)
                yield (*_GROUPS, number, key), LocalTensor.of(key, value) if is_tensor else value

    def targets(self, saved: Mapping[str, SavedLeaf]) -> Targets:
        groups = {leaf.path[2] for leaf in saved.values() if leaf.path[:2] == _GROUPS}
        if len(groups) != len(self._owner.param_groups):
            raise CheckpointMismatch(
                f"the saved optimizer has {len(groups)} parameter groups, and this optimizer has "
                f"{len(self._owner.param_groups)}; create it with the same groups"
            )
        current = {key_of(path): value for path, value in self.leaves()}
        parameters = self._parameters()
        stepped = set[tuple[str, bool]]()
        found: Targets = {}
        for key, leaf in saved.items():
            if leaf.path[:2] == _GROUPS:
                found[key] = leaf.path, _target(key, leaf, current.get(key))
            elif leaf.path[:2] == _STATE and (name := str(leaf.path[2])) in parameters:
                stepped.add((name, len(leaf.path) > 3))
                found[key] = leaf.path, _state_target(key, leaf, current.get(key), *parameters[name])
        mixed = sorted(name for name, has_stepped in stepped if has_stepped and (name, False) in stepped)
        if mixed:
            raise CheckpointMismatch(
                f"of {mixed[0]}, some ranks' optimizers had a state when they were saved, and others had made no step; "
                "step on all ranks, or load the parts without the optimizer (parts=[...])"
            )
        return found

    def apply(self, leaves: Mapping[Path, Any]) -> None:
        state = _nested({path[1:]: value for path, value in leaves.items()})
        groups, saved = state["groups"], state.get("state", {})
        for number, values in enumerate(groups) if isinstance(groups, list) else groups.items():
            self._owner.param_groups[int(number)].update(values)
        for name, (parameter, _, _) in self._parameters().items():
            self._owner.state.pop(parameter, None)
            if saved.get(name):  # else it was saved before its first step
                self._owner.state[parameter] = saved[name]


def _state_target(
    key: str, leaf: SavedLeaf, current: Any, parameter: torch.Tensor, layout: LocalTensor, group: Any
) -> LocalTensor | None:
    """Return the tensor of a parameter's state to fill, created if there is none; None for a value."""
    if leaf.dtype is None or isinstance(current, LocalTensor):
        return None if leaf.dtype is None else current
    if leaf.shape and leaf.shape == layout.shape:
        return LocalTensor.of(key, torch.zeros_like(parameter.detach(), dtype=leaf.dtype)).like(layout)
    target = _blank(key, leaf)
    if leaf.path[-1] == "step" and not (group.get("capturable") or group.get("fused")):
        return target  # torch keeps step counts in host memory
    return LocalTensor.of(key, target.local.to(parameter.device))


def _target(key: str, leaf: SavedLeaf, current: Any) -> LocalTensor | None:
    """Return the tensor to fill: the current tensor if it fits, else a new tensor; None for a value."""
    if leaf.dtype is None:
        return None
    if isinstance(current, LocalTensor):
        fits = (current.local.dtype, current.shape) == (leaf.dtype, leaf.shape)
        # A load cannot fill a tensor whose elements share memory.
        sizes = zip(current.local.stride(), current.local.shape, strict=True)
        if current.declared or (fits and not any(stride == 0 and size > 1 for stride, size in sizes)):
            return current
    return _blank(key, leaf)


def _blank(key: str, leaf: SavedLeaf) -> LocalTensor:
    if leaf.sharded:
        raise CheckpointMismatch(
            f"{key} was saved as a sharded tensor, and the state here has no tensor of that name to load it into: "
            "create it first (an optimizer has its state after the first step), or px.register_state(self, "
            "model=..., optimizer=...), which creates it"
        )
    return LocalTensor.of(key, torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu"))


def _check_forms(saved: Mapping[str, SavedLeaf], targets: Mapping[str, LocalTensor | None]) -> None:
    missing = sorted(targets.keys() - saved.keys())
    if missing:
        example = next((key for key, leaf in saved.items() if leaf.dtype is not None), "none")
        raise CheckpointMismatch(
            f"{len(missing)} tensors were not saved: {', '.join(missing[:8])}; saved tensors are {example}, ..."
        )
    wrong: list[str] = []
    for key, target in targets.items():
        leaf = saved[key]
        if target is None or (leaf.dtype is None and not target.declared):
            continue  # format 1 pickles tensors that differ by rank
        target.check(key)
        if leaf.dtype is None:
            raise CheckpointMismatch(
                f"{key}: saved as values by rank, and here as a sharded tensor; load into the layout that saved it, or "
                "declare there how it is sharded and save again"
            )
        there, here = f"{list(leaf.shape)} {leaf.dtype}", f"{list(target.shape)} {target.local.dtype}"
        if there != here:
            wrong.append(f"{key} is {there} where it was saved, and {here} here")
    if wrong:
        raise CheckpointMismatch(f"{len(wrong)} tensors differ: {'; '.join(wrong[:5])}")


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the identity of a tensor's memory: equal for a parameter and for its local tensor."""
    local = local_of(tensor.detach())
    if local.numel() == 0:
        return ("empty", id(tensor))
    return (local.data_ptr(), tuple(local.shape), tuple(local.stride()))


def _flat(state: Any, path: Path) -> Iterator[StateLeaf]:
    """Yield the leaves of nested dicts. Lists, and special dicts without tensors (such as ``Counter``), are leaves."""
    if _is_nested(state):
        for key, value in state.items():
            yield from _flat(value, (*path, key))
    elif type(state) in (list, tuple) and _contains(state, DTensor):
        raise CheckpointError(
            f"{key_of(path)} of the state is a {type(state).__name__} with sharded tensors (DTensor), which is "
            "pickled as one value; use a dict"
        )
    else:
        yield path, LocalTensor.of(key_of(path), state) if isinstance(state, torch.Tensor) else state


def _is_nested(state: Any) -> bool:
    if not isinstance(state, Mapping) or not state or not all(type(key) in (str, int) for key in state):
        return False
    special = isinstance(state, dict) and type(state) not in (dict, OrderedDict)
    return not special or _contains(state, torch.Tensor)


def _contains(state: Any, kind: type) -> bool:
    if isinstance(state, Mapping):
        return any(_contains(value, kind) for value in state.values())
    if type(state) in (list, tuple):
        return any(_contains(value, kind) for value in state)
    return isinstance(state, kind)


def _nested(leaves: Mapping[Path, Any]) -> Any:
    """Return the state that has these leaves."""
    if () in leaves:
        return leaves[()]
    inner: dict[Any, dict[Path, Any]] = {}
    for path, value in leaves.items():
        inner.setdefault(path[0], {})[path[1:]] = value
    built = {step: _nested(value) for step, value in inner.items()}
    if built and all(isinstance(step, tuple) for step in built):
        values = [built[step] for step in sorted(built)]
        return tuple(values) if next(iter(built))[0] == "tuple" else values
    return built
