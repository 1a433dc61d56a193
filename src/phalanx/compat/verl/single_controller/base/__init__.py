"""Workers, groups and pools: the names of ``verl.single_controller.base``."""

from phalanx.compat.verl.single_controller.base.worker import Worker
from phalanx.compat.verl.single_controller.base.worker_group import (
    ClassWithInitArgs,
    ResourcePool,
    WorkerGroup,
)

__all__ = ["ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup"]
