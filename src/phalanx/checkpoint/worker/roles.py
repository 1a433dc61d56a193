"""Which parts the state of a role has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from phalanx.checkpoint.worker.optimizer import OptimizerPart
from phalanx.checkpoint.worker.rng import Generators
from phalanx.checkpoint.worker.state_components import ModelPart, Part, StatePart
from phalanx.declare.state_declarations import StateOf
from phalanx.declare.stateful import stateful
from phalanx.errors import CheckpointError

__all__ = ["has_state", "parts_of"]


def has_state(instance: Any, declared: StateOf | None) -> bool:
    """Whether a role says what its state is."""
    return declared is not None or all(
        callable(getattr(instance, name, None)) for name in ("state_dict", "load_state_dict")
    )


def parts_of(instance: Any, declared: StateOf | None, device: Any) -> list[Part]:
    """The parts of a role.

    Raises:
        CheckpointError: it has none.
    """
    if not has_state(instance, declared):
        raise CheckpointError(
            f"{type(instance).__qualname__} has nothing to save: give it state_dict() and load_state_dict(state), or "
            "call px.register_state(self, model=..., optimizer=...) in its constructor"
        )
    return [StatePart("", instance)] if declared is None else list(_declared(declared, device))


def _declared(state: StateOf, device: Any) -> Iterator[Part]:
    model = None
    if state.model is not None:
        model = ModelPart(state)
        yield model
    if isinstance(state.optimizer, torch.optim.Optimizer):
        yield OptimizerPart(state.optimizer, state, model)
    elif state.optimizer is not None:
        yield StatePart("optimizer", stateful(state.optimizer))
    for name, part in state.others.items():
        yield StatePart(name, stateful(part))
    if state.rng:
        yield StatePart("rng", Generators(device))
