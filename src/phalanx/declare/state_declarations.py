"""Declarations of a worker's state, which ``px.save`` writes and ``px.load`` restores.

A declaration is cheap: the state is read only when it is saved, and written only when it is loaded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phalanx.declare.context import WorkerContext, context_of
from phalanx.errors import DeclarationError

#: Methods that get and set a state: of torch's modules and most of its classes; of the generators of torch and the old
#: generators of numpy; of the generators of ``random``.
_PAIRS = (("state_dict", "load_state_dict"), ("get_state", "set_state"), ("getstate", "setstate"))
_ONE = "state"
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))


@dataclass(frozen=True)
class StateOf:
    """Declared state components of a role; see :func:`register_state`."""

    model: Any = None
    optimizer: Any = None
    rng: bool = True
    boxes: Mapping[str, Any] | None = None
    megatron: Any = None
    others: Mapping[str, Any] = field(default_factory=dict)


def declared_states(context: WorkerContext) -> dict[str, StateOf]:
    """Return the state declarations of a rank by role, given the context of any of its workers."""
    return context.shared.setdefault("state", {})


def register_state(
    worker: object,
    *,
    model: Any = None,
    optimizer: Any = None,
    rng: bool = True,
    boxes: Mapping[str, Any] | None = None,
    megatron: Any = None,
    **others: Any,
) -> None:
    """Declare the state of a worker, so that ``px.save`` can write it and ``px.load`` restore it.

    Without a declaration, a worker's ``state_dict()`` and ``load_state_dict(state)`` are called.

    Args:
        worker: the worker object: ``self`` in its class.
        model: an ``nn.Module`` (its parameters and persistent buffers, not its extra state), or a mapping of names to
            tensors. A load writes into the tensors, in place.
        optimizer: the optimizer of the model's parameters. A ``torch.optim.Optimizer`` is saved by parameter names, so
            that it can be loaded into another sharding, also before its first step.
        rng: True to save the states of each rank's random generators: of torch (with the current accelerator), numpy
            and ``random``.
        boxes: ``px.weights.ShardSpec`` of tensors of the model with a declared layout, by name.
        megatron: ``px.weights.MegatronRank``, if the model is a Megatron module.
        others: further components by name: an object with ``state_dict()`` and ``load_state_dict(state)``; a random
            generator of torch, numpy or ``random``; or a dict of such objects and plain values. A load puts plain
            values into the dict, and loads objects in it, and in its dicts, lists and tuples, in place.

    Raises:
        DeclarationError: if the arguments contradict each other, or a component has no state.
    """
    if boxes is not None and megatron is not None:
        raise DeclarationError(
            "px.register_state(boxes=..., megatron=...): give one of them, which says where boxes are"
        )
    if (boxes is not None or megatron is not None) and model is None:
        raise DeclarationError("px.register_state: boxes= and megatron= are of a model; give model= too")
    for name, part in (("optimizer", optimizer), *others.items()):
        if part is not None and stateful(part) is None:
            raise DeclarationError(
                f"px.register_state({name}={type(part).__name__}): a part has state_dict() and load_state_dict(state), "
                "or is a random generator, or a dict of such objects and of plain values, which a load puts back"
            )
    context = context_of(worker)
    kept = {name: part for name, part in others.items() if part is not None}
    declared_states(context)[context.role] = StateOf(model, optimizer, rng, boxes, megatron, kept)


class Ways(NamedTuple):
    """Functions that get and set the state of an object."""

    get: Callable[[], Any]
    put: Callable[[Any], Any]


def ways_of(value: Any) -> Ways | None:
    """Return the functions that get and set the state of an object; None for a plain value or a class."""
    if isinstance(value, type):
        return None
    for get, put in _PAIRS:
        if callable(getattr(value, get, None)) and callable(getattr(value, put, None)):
            return Ways(getattr(value, get), getattr(value, put))
    bits = getattr(value, "bit_generator", None)  # numpy's generators
    if bits is not None and hasattr(bits, "state"):
        return Ways(lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None


def stateful(value: Any) -> Any:
    """Return the object if it has ``state_dict()``, else an adapter with this method; None if it has no state."""
    if all(callable(getattr(value, name, None)) for name in _PAIRS[0]):
        return value
    if ways_of(value) is not None:
        return _Named({_ONE: value})
    return _Named(value) if isinstance(value, MutableMapping) else None  # pyright: ignore[reportUnknownArgumentType]


class _Named:
    """Adapter of a dict: a load sets the state of objects in the dict, and replaces plain values."""

    def __init__(self, values: MutableMapping[str, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[str, Any]:
        found = self._values.items()
        return {name: ways.get() if (ways := ways_of(value)) else value for name, value in found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            current = self._values.get(name)
            if ways := ways_of(current):
                ways.put(value)
            else:
                self._values[name] = _in_place(current, value, {})


def _in_place(current: Any, loaded: Any, seen: dict[int, tuple[Any, Any]]) -> Any:
    """Return a loaded value in which stateful objects of ``current``, at any depth, replace their loaded copies.

    The current objects take the state of the loaded objects at the same places. ``seen`` has the loaded value, so that
    its id stays its own, and the result by this id.
    """
    if type(loaded) in _PLAIN:
        return loaded
    if id(loaded) in seen:
        return seen[id(loaded)][1]
    seen[id(loaded)] = loaded, loaded
    if type(current) is type(loaded) and _is_stateful(type(loaded)):
        ways, given = ways_of(current), ways_of(loaded)
        if ways and given:
            ways.put(given.get())
            seen[id(loaded)] = loaded, current
        return seen[id(loaded)][1]
    if isinstance(current, tuple) and type(loaded) is tuple:
        found = tuple(_in_place(list(current), list(loaded), seen))
        return loaded if all(map(operator.is_, found, loaded)) else found
    if isinstance(current, dict) and isinstance(loaded, dict):
        places = current.keys() & loaded.keys()
    elif isinstance(current, list) and isinstance(loaded, list):
        places = range(min(len(current), len(loaded)))
    else:
        return loaded
    if not _PLAIN.issuperset(map(type, loaded.values() if isinstance(loaded, dict) else loaded)):
        for place in places:
            found = _in_place(current[place], loaded[place], seen)
            if found is not loaded[place]:
                loaded[place] = found
    return loaded


def _is_stateful(kind: type) -> bool:
    """Return whether objects of a class have ``state_dict()``, or are random generators of a library."""
    return hasattr(kind, _PAIRS[0][1]) or kind.__module__.partition(".")[0] in ("torch", "numpy", "random")
