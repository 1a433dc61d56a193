"""Declarations of a worker's state: the parts that ``px.save`` writes and ``px.load`` restores.

Saying so costs nothing: the parts are looked at when something is saved or loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phalanx.declare.context import WorkerContext, context_of
from phalanx.errors import DeclarationError

#: Modules and most of torch; its generators, numpy's old ones; those of ``random``.
_PAIRS = (("state_dict", "load_state_dict"), ("get_state", "set_state"), ("getstate", "setstate"))
_ONE = "state"


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
            of torch, numpy or ``random``; a dict of such things, of plain values, which are put back into it, and of
            such dicts.

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
    """Return how to get and set the state of an object; None for a value that is its own state."""
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


def _ways_in(value: Any) -> Ways | None:
    """Return how to get and set the state of an object, or of a dict in which there are such objects.

    Raises:
        DeclarationError: if a list or tuple contains one.
    """
    if isinstance(value, list | tuple) and any(map(ways_of, value)):  # pyright: ignore[reportUnknownArgumentType]
        raise DeclarationError(
            f"a {type(value).__name__} in a state to save contains an object with a state of its own; expected a dict "
            "of such objects, with a name for each"
        )
    if isinstance(value, MutableMapping) and ways_of(value) is None and any(map(_ways_in, value.values())):
        return ways_of(_Named(value))  # pyright: ignore[reportUnknownArgumentType]
    return ways_of(value)


class _Named:
    """A dict: objects in it are loaded in place, plain values are put back into it."""

    def __init__(self, values: MutableMapping[str, Any]) -> None:
        self._values = values
        for value in values.values():
            _ways_in(value)  # refuses lists of objects

    def state_dict(self) -> dict[str, Any]:
        found = self._values.items()
        return {name: ways.get() if (ways := _ways_in(value)) else value for name, value in found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            ways = _ways_in(self._values.get(name))
            if ways is None:
                self._values[name] = value
            else:
                ways.put(value)
