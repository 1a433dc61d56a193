"""verl's single controller on Phalanx.

Call :func:`install` once, before anything of verl is imported and best before ``ray.init``. If verl is installed, its
trainers, engines and ``DataProto`` stay, and only ``verl.single_controller`` comes from this package: in the driver, in
the workers, and in Ray's tasks and actors of this driver. Without verl, ``import verl`` imports the single controller
and the few other names that verl's tutorial imports.
"""

from __future__ import annotations

from typing import Any

from phalanx.compat.verl import overlay
from phalanx.compat.verl.installation import install as install
from phalanx.compat.verl.installation import install_here as install_here
from phalanx.config import overlays_verl

#: The version of verl whose names and behavior this package has.
__version__ = overlay.TESTED

__all__ = ["__version__", "install"]


def __getattr__(name: str) -> Any:
    if name == "DataProto":  # without this, `from verl import DataProto` would not say what is missing
        raise overlay.VerlNotInstalled("DataProto is verl's own class: pip install verl")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if overlays_verl():  # an unpickled value may import this package before a process imports verl
    overlay.install_here()
