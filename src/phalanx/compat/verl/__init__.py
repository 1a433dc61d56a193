"""Names of verl 0.9.1's single controller, for code that was written on it.

Either import from here what was imported from ``verl``, or call :func:`install` once, before anything of verl is
imported and best before ``ray.init``: then ``import verl.single_controller...`` gives this package, in the driver,
in the workers, and in Ray's tasks and actors of this driver. With ``install(overlay=True)`` the installed verl stays,
its trainers too, and only its single controller comes from here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from phalanx.compat.verl import overlay
from phalanx.compat.verl.installation import install as install
from phalanx.compat.verl.installation import install_here as install_here
from phalanx.config import overlays_verl

if TYPE_CHECKING:
    from phalanx.compat.verl.protocol import DataProto as DataProto

#: The version of verl whose names and behaviour these are.
__version__ = "0.9.1"

__all__ = ["DataProto", "__version__", "install"]


def __getattr__(name: str) -> Any:
    if name == "DataProto":
        return importlib.import_module("phalanx.compat.verl.protocol").DataProto
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if overlays_verl():  # also where a value that was pickled is what brings this package into a process
    overlay.install_here()
