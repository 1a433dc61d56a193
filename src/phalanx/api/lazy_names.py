"""Packages whose public names are loaded at their first use."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package that loads its names on first use.

    The names are read from the package's ``if TYPE_CHECKING:`` block, so that they are listed only once. Names that the
    block imports from the package itself are its public submodules.

    Raises:
        ImportError: if the package is installed without its source files.
    """
    loader: Any = sys.modules[package].__loader__
    source: str | None = loader.get_source(package)
    if source is None:
        raise ImportError(
            f"{package} is installed without its source files, which it reads; install those too"
        )
    block = next(node for node in ast.parse(source).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}
    submodules = [name for name, home in homes.items() if home == package]

    def load(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        home = homes.get(name)
        if home is None:
            # with name= and obj=, a traceback suggests the nearest public name
            message = f"module {package!r} has no attribute {name!r}{elsewhere(name)}"
            raise AttributeError(message, name=name, obj=sys.modules[package])
        value = getattr(importlib.import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    def elsewhere(name: str) -> str:
        """Return, as part of an error message, the public submodule that has the name; "" if none has it."""
        public = () if name.startswith("_") else submodules
        places = [one for one in public if name in dir(importlib.import_module(f"{package}.{one}"))]
        return f"; it is {package}.{places[0]}.{name}" if places else ""

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return load, names, sorted(homes)
