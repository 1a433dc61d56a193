"""One driver that commands groups of workers, as ``verl.single_controller`` has it."""

from phalanx.compat.verl.single_controller import base as base
from phalanx.compat.verl.single_controller.base import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup

#: The version of verl whose names and behaviour these are.
__version__ = "0.9.1"

__all__ = ["ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup"]
