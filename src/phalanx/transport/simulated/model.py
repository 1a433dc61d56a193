"""What is simulated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from phalanx.transport.simulated.constants import Constants

Runs = Literal["none", "one", "each"]


@dataclass(frozen=True)
class Model:
    """The cluster that is simulated.

    ``cores`` are those of each node. ``driver_apart`` gives the driver a node of its own. ``run`` says on which workers
    the real methods are run, one after another in this process: on none, on one of each group which stands for all, or
    on each. ``hours_between_failures`` of one node is the mean.
    """

    nodes: int
    ranks_per_node: int
    cores: int = 32
    accelerators: bool = True
    driver_apart: bool = True
    run: Runs = "none"
    fill: bool = True
    seed: int = 0
    hours_between_failures: float | None = None
    constants: Constants = field(default_factory=Constants)


class SimulatedFault(RuntimeError):
    """What a rank raises where the cost of a method says that it may."""
