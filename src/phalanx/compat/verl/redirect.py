"""Modules under other names (the same modules, not copies), and arguments that ``ray.init`` gets besides its own."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

#: Package with verl's names, and the modules of verl whose names are in a module of another name there.
HOME = "phalanx.compat.verl"
_ELSEWHERE = {
    "single_controller.ray.megatron": "megatron",
    "single_controller.base.megatron": "single_controller.base",
    "single_controller.base.megatron.worker": "single_controller.base.worker",
    "models": "megatron",
    "models.llama": "megatron",
    "models.llama.megatron": "megatron",
    "models.llama.megatron.layers": "megatron",
    "utils": "megatron",
    "utils.megatron_utils": "megatron",
}


def home_of(name: str) -> str | None:
    """Return the module here with the names of the module ``name`` of verl ("": of verl itself); None if none has."""
    if name.partition(".")[0] not in ("", "single_controller") and name not in _ELSEWHERE:
        return None
    home = f"{HOME}.{_ELSEWHERE.get(name, name)}" if name else HOME
    try:
        return home if importlib.util.find_spec(home) is not None else None
    except ModuleNotFoundError:
        return None


class Redirect(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder and loader of modules for which ``home_of`` returns another name; None leaves them to other finders."""

    def __init__(self, home_of: Callable[[str], str | None]) -> None:
        self.home_of = home_of

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec that imports the home module, if there is one."""
        home = self.home_of(fullname)
        found = None if home is None else importlib.util.find_spec(home)
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the home module, imported under its own name."""
        module = importlib.import_module(self.home_of(spec.name) or spec.name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which the import system has replaced by the alias's spec."""
        alias = module.__spec__
        if alias is not None and alias.loader is self:
            module.__spec__ = alias.loader_state


def amend_ray_init(mark: str, amend: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Make ``ray.init`` pass its keyword arguments through ``amend``, once for each ``mark``."""
    import ray

    original = ray.init
    if hasattr(original, mark):
        return

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **amend(kwargs))

    setattr(init, mark, True)
    ray.init = init
