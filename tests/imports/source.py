"""Modules under src/phalanx and their imports, which are read and not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
# Functions that import the module that their argument names.
LOADERS = frozenset({"import_module", "__import__", "lazy"})


def module_name(path: Path) -> str:
    """Return the dotted name of the module in a file."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES: Mapping[str, Path] = {module_name(path): path for path in sorted((SOURCE / "phalanx").rglob("*.py"))}


def imports(source: str, module: str, *, is_package: bool = False) -> Iterator[str]:
    """Yield the imports of ``source``, at any depth and also through ``import_module("...")`` and ``lazy("...")``.

    Names are absolute; ``from a import b`` imports ``a.b``.
    """
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) in LOADERS:
            texts = [one.value for one in node.args if isinstance(one, ast.Constant)]
            yield from (text for text in texts if isinstance(text, str))


def imports_of(module: str) -> set[str]:
    """Return the absolute names that a module of phalanx imports."""
    path = MODULES[module]
    return set(imports(path.read_text(), module, is_package=path.name == "__init__.py"))


def called(call: ast.Call) -> str | None:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else None
