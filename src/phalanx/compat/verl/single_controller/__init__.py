"""A driver that controls groups of workers: the names of ``verl.single_controller``."""

import sys

from phalanx.compat.verl import overlay

if overlay.active() and "verl" not in sys.modules:  # imported by an unpickled value
    overlay.import_verl()

from phalanx.compat.verl.single_controller import base as base
from phalanx.compat.verl.single_controller.base import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup

#: The version of verl whose names and behavior this package has.
__version__ = overlay.TESTED

__all__ = ["ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup"]
