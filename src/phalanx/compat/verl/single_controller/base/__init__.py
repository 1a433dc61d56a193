"""Workers, groups and pools, as ``verl.single_controller.base`` has them."""

from phalanx.compat.verl.single_controller.base.worker import Worker
from phalanx.compat.verl.single_controller.base.worker_group import (
    ClassWithInitArgs,
    ResourcePool,
    WorkerGroup,
)

__all__ = ["ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup"]
