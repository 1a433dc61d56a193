"""Modules under src/phalanx and their imports, which are read and not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeGuard

SOURCE = Path(__file__).parents[2] / "src"
LOADERS = frozenset(
    {"import_module", "__import__", "lazy"}
)  # functions that import the module that their argument names


def module_name(path: Path) -> str:
    """Return the dotted name of the module in a file."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES: Mapping[str, Path] = {module_name(path): path for path in sorted((SOURCE / "phalanx").rglob("*.py"))}


def imports(source: str, module: str, *, is_package: bool = False, loaded: bool = False) -> Iterator[str]:
    """Yield the imports of ``source``, at any depth and also through ``import_module("...")`` and ``lazy("...")``.

    Names are absolute; ``from a import b`` imports ``a.b``.

    ``loaded=True`` yields only imports that run with the module: none inside functions or under
    ``if TYPE_CHECKING:``.
    """
    package = module if is_package else module.rpartition(".")[0]
    for node in _nodes(ast.parse(source), loaded):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) in (LOADERS - {"lazy"} if loaded else LOADERS):
            yield from _texts(node.args)


def imports_of(module: str, *, loaded: bool = False) -> set[str]:
    """Return the absolute names that a module of phalanx imports; ``loaded`` as for :func:`imports`."""
    path = MODULES[module]
    is_package = path.name == "__init__.py"
    return set(imports(path.read_text(), module, is_package=is_package, loaded=loaded))


def hidden_imports(source: str) -> Iterator[tuple[int, int]]:
    """Yield the lines of each function or block for type checkers and of each import inside."""
    for block in ast.walk(ast.parse(source)):
        if isinstance(block, ast.FunctionDef | ast.AsyncFunctionDef) or _is_for_type_checkers(block):
            inside = (node for node in ast.walk(block) if isinstance(node, ast.Import | ast.ImportFrom))
            yield from ((block.lineno, node.lineno) for node in inside)


def _is_for_type_checkers(node: ast.AST) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def _texts(arguments: list[ast.expr]) -> Iterator[str]:
    for argument in arguments:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield argument.value


def _nodes(tree: ast.AST, loaded: bool) -> Iterator[ast.AST]:
    children = list(ast.iter_child_nodes(tree))
    if loaded and isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return
    if loaded and isinstance(tree, ast.If) and _is_for_type_checkers(tree):
        children = list(tree.orelse)
    for child in children:
        yield child
        yield from _nodes(child, loaded)


def called(call: ast.Call) -> str | None:
    """Return the name of the called function."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else None
