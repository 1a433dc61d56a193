"""References of the simulated backend."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.transport.simulated.processes import Value
from phalanx.transport.timed import TimedRef
from phalanx.transport.values import Ref


@dataclass(eq=False)
class SimulatedRef(TimedRef):
    """A reference with the size of its value in the model."""

    value: Value = field(default_factory=Value)


def value_of(ref: Ref) -> Value | None:
    """What the model knows of it; None for one that it does not know."""
    return ref.value if isinstance(ref, SimulatedRef) else None


def has_failed(ref: Ref) -> bool:
    """Whether it stands for no value."""
    return getattr(ref, "failure", None) is not None or getattr(ref, "lost", None) is not None
