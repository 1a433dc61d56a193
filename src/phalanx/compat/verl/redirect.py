"""A finder that gives modules under other names: the same modules, not copies."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
from collections.abc import Sequence
from types import ModuleType


class Redirect(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives a module for which :meth:`home_of` names another."""

    def home_of(self, fullname: str) -> str | None:
        """The name of the module that ``fullname`` gives; None leaves it to other finders."""
        raise NotImplementedError

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """How ``fullname`` is imported: as the module that is its home, where there is one."""
        home = self.home_of(fullname)
        found = None if home is None else importlib.util.find_spec(home)
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The module itself, imported under its own name."""
        module = importlib.import_module(self.home_of(spec.name) or spec.name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Undo what the import system did: it has just written the alias's spec into a module of its own."""
        alias = module.__spec__
        if alias is not None and alias.loader is self:
            module.__spec__ = alias.loader_state
