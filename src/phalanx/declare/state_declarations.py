"""Declarations of a worker's state: the parts that ``px.save`` writes and ``px.load`` restores.

Saying so costs nothing: the parts are looked at when something is saved or loaded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phalanx.declare.context import WorkerContext, context_of
from phalanx.errors import DeclarationError

#: Modules and most of torch; its generators, numpy's old ones; those of ``random``.
_PAIRS = (("state_dict", "load_state_dict"), ("get_state", "set_state"), ("getstate", "setstate"))
_ONE = "state"
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))


@dataclass(frozen=True)
class StateOf:
    """The state components of a role; see :func:`register_state`."""

    model: Any = None
    optimizer: Any = None
    rng: bool = True
    boxes: Mapping[str, Any] | None = None
    megatron: Any = None
    others: Mapping[str, Any] = field(default_factory=dict[str, Any])


def declared_states(context: WorkerContext) -> dict[str, StateOf]:
    """Return the declarations of the roles of the rank that ``context`` describes."""
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
        worker: the object of the role; ``self`` where a class is no ``px.Worker``.
        model: an ``nn.Module`` (its parameters and persistent buffers, not its extra state), or a mapping of names to
            tensors. A load writes into the tensors, in place.
        optimizer: of the model's parameters. A ``torch.optim.Optimizer`` is saved by the parameters' names, so that
            it can be loaded where they are sharded otherwise, before its first step too.
        rng: save the states of the random generators of torch (with the current accelerator's), numpy and
            ``random``, each rank's own.
        boxes: ``px.weights.ShardSpec`` of tensors of the model with a declared layout, by name.
        megatron: ``px.weights.MegatronRank`` where the model is a Megatron module.
        others: further parts by name: whatever has ``state_dict()`` and ``load_state_dict(state)``; a random generator
            of torch, numpy or ``random``; a dict of such things and of plain values, which are put back into it. Such
            things within its dicts, lists and tuples are loaded in place, too.

    Raises:
        DeclarationError: the arguments contradict each other, or a part has no state.
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
                "or is a random generator, or a dict of such things and of plain values, which a load puts back into it"
            )
    context = context_of(worker)
    kept = {name: part for name, part in others.items() if part is not None}
    declared_states(context)[context.role] = StateOf(model, optimizer, rng, boxes, megatron, kept)


class Ways(NamedTuple):
    """Functions that get and set the state of an object."""

    get: Callable[[], Any]
    put: Callable[[Any], Any]


def ways_of(value: Any) -> Ways | None:
    """Return how to get and set the state of an object; None for a value that is its own state, or a class."""
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
    """Return the object itself if it has ``state_dict()``, else an adapter with it; None if it has no state."""
    if all(callable(getattr(value, name, None)) for name in _PAIRS[0]):
        return value
    if ways_of(value) is not None:
        return _Named({_ONE: value})
    return _Named(value) if isinstance(value, MutableMapping) else None  # pyright: ignore[reportUnknownArgumentType]


class _Named:
    """A dict: objects in it are loaded in place, plain values are put back into it."""

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


def _in_place(current: Any, loaded: Any, seen: dict[int, Any]) -> Any:
    """Return a loaded value with the objects of ``current``, in dicts and lists, that have a state of their own.

    These take over the state of the objects that were saved as values in their places. ``seen`` has the results for
    values by id.
    """
    if type(loaded) in _PLAIN or id(loaded) in seen:
        return seen.get(id(loaded), loaded)
    seen[id(loaded)] = loaded
    if type(current) is type(loaded) and _is_stateful(type(loaded)):
        ways, given = ways_of(current), ways_of(loaded)
        if ways and given:
            ways.put(given.get())
            seen[id(loaded)] = current
        return seen[id(loaded)]
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
