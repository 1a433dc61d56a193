"""Declarations of a worker's state: the parts that ``px.save`` writes and ``px.load`` restores.

Saying so costs nothing: the parts are looked at when something is saved or loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.declare.context import WorkerContext, context_of
from phalanx.declare.stateful import stateful
from phalanx.errors import DeclarationError


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
        model: an ``nn.Module``, or a mapping of names to tensors, which a load writes into, in place.
        optimizer: of the model's parameters. A ``torch.optim.Optimizer`` is saved by the parameters' names, so that
            it can be loaded where they are sharded otherwise, before its first step too.
        rng: save the states of the random generators of torch (with the current accelerator's), numpy and
            ``random``, each rank's own.
        boxes: ``px.weights.ShardSpec`` of tensors of the model with a declared layout, by name.
        megatron: ``px.weights.MegatronRank`` where the model is a Megatron module.
        others: further parts by name: whatever has ``state_dict()`` and ``load_state_dict(state)``; a random generator
            of torch, numpy or ``random``; a dict of such things and of plain values, which are put back into it.

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
