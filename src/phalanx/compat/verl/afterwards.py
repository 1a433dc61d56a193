"""What follows the import of a module of verl's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def followed_by(then: Callable[[], object], fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """How a module is found that lies on ``path``; ``then`` is called when it was imported."""
    spec = PathFinder.find_spec(fullname, path)
    if spec is None or spec.loader is None:
        return spec
    run = spec.loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        then()

    spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # the loader is of this module alone
    return spec
