"""Packages whose public names are loaded when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], submodules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that loads its names on first use.

    Args:
        package: ``__name__`` of the package.
        homes: the module that defines each public name.
        submodules: modules of the package that are public names themselves.
    """

    def load(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        home = homes.get(name)
        if home is None:
            # name= and obj= let a traceback suggest the nearest public name
            message = f"module {package!r} has no attribute {name!r}{elsewhere(name)}"
            raise AttributeError(message, name=name, obj=sys.modules[package])
        value = getattr(importlib.import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    def elsewhere(name: str) -> str:
        """Return where among the public submodules a name is, as part of a message."""
        public = () if name.startswith("_") else submodules
        places = [one for one in public if name in dir(importlib.import_module(f"{package}.{one}"))]
        return f"; it is {package}.{places[0]}.{name}" if places else ""

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes, *submodules})

    return load, names
