"""A process that stands by: it has no rank yet, and has imported what the ranks of its group have."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

from phalanx.errors import PhalanxError
from phalanx.execution.imports import importing
from phalanx.topology.accelerators import MASK_VARIABLES
from phalanx.topology.environment import IDENTITY
from phalanx.wire.codec import decode
from phalanx.wire.messages import STORE_VARIABLE

if TYPE_CHECKING:  # what is asked of a process is named where nothing of it is there
    from phalanx.execution.host import Host

__all__ = ["Imported", "imported", "stand_by"]


@dataclass(frozen=True)
class Imported:
    """The modules that a rank has imported, in their order, and the variables with which it did so."""

    modules: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


def imported(host: Host) -> Imported:
    """What this rank has imported: a process that is to become one like it can do so before."""
    setup = host.place
    if host.in_driver or setup is None:
        return Imported()
    own = IDENTITY | MASK_VARIABLES | {STORE_VARIABLE}
    environment = {name: value for name, value in setup.environment.items() if name not in own}
    modules = list(sys.modules.items())
    return Imported(tuple(name for name, module in modules if _can_be_found(name, module)), environment)


def _can_be_found(name: str, module: ModuleType) -> bool:
    """Whether another process gets the module by its name: not so of ``__main__``, and of what code put there."""
    spec = getattr(module, "__dict__", {}).get("__spec__")
    return spec is not None and spec.loader is not None and spec.name == name


def stand_by(host: Host, classes: bytes, like: Imported) -> float:
    """Import the classes of a group, then what a rank of it has imported; the seconds that it took.

    A module that cannot be imported is left to the constructors, which may not need it.

    Raises:
        PhalanxError: an import took hold of the accelerators, so that this process cannot have a rank's any more.
    """
    began = time.monotonic()
    if host.in_driver:
        decode(classes)
        return time.monotonic() - began
    os.environ.update(like.environment)
    with importing():
        decode(classes)
        for name in like.modules:
            if name not in sys.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise PhalanxError(
            "importing the classes initialises CUDA, before a process knows its device, so that none can stand by; "
            "do that in the constructor"
        )
    return time.monotonic() - began
