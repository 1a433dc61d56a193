"""Who may import whom, read from the source: the table of layers holds for every module under src/phalanx."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

# A module imports only from its own row and the rows above it; the longest prefix says which row it is in.
LAYERS = (
    "phalanx.errors",
    "phalanx.config",
    "phalanx.topology",
    "phalanx.wire",
    "phalanx.show",
    "phalanx.tracing",
    "phalanx.declare",
    "phalanx.dispatch",
    "phalanx.collect",
    "phalanx.transport.base",
    "phalanx.transport",  # what the backends share
    "phalanx.transport.ray",
    "phalanx.transport.inline",
    "phalanx.execution",
    "phalanx.runtime.session",
    "phalanx.runtime.life",
    "phalanx.runtime.pools",
    "phalanx.runtime.calls",
    "phalanx.runtime.groups",
    "phalanx.runtime.links",
    "phalanx.runtime.tools",
    "phalanx.runtime.api",
    "phalanx.runtime",
    "phalanx.parallel",
    "phalanx",
    "phalanx.compat",
    "phalanx.cli",
    "phalanx.testing",
    "phalanx.__main__",
)
NEVER = {  # within "rows above", all the same
    "phalanx.transport.inline": {"phalanx.transport.ray"},
    "phalanx.execution": {
        "phalanx.transport.base",
        "phalanx.transport.ray",
        "phalanx.transport.inline",
        "phalanx.transport",
    },
}
MAY_USE_RAY = {"phalanx.transport.ray", "phalanx.compat"}
WITHOUT_TORCH = {
    "phalanx.errors",
    "phalanx.config",
    "phalanx.topology",
    "phalanx.declare",
    "phalanx.tracing",
    "phalanx.show",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((SOURCE / "phalanx").rglob("*.py"))}


def row(module: str) -> str:
    """The row that ``module`` is in; public names, and modules that no row names, are in "phalanx"."""
    fitting = [layer for layer in LAYERS if module == layer or module.startswith(layer + ".")]
    return max(fitting, key=len)


def imports(source: str, module: str, *, is_package: bool = False, loaded: bool = False) -> set[str]:
    """Absolute names of all that ``source`` imports, at any depth and also through ``import_module("...")``.

    ``loaded=True`` keeps to what importing the module loads: not what is inside functions (loaded when they
    are called), nor what stands under ``if TYPE_CHECKING:`` (loaded never).
    """
    package = module if is_package else module.rpartition(".")[0]
    found: set[str] = set()
    for node in _nodes(ast.parse(source), loaded):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found.update(f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node.func) in {"import_module", "__import__"}:
            texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            found.update(text for text in texts if isinstance(text, str))
    return found


def _nodes(tree: ast.AST, loaded: bool) -> Iterator[ast.AST]:
    children = list(ast.iter_child_nodes(tree))
    if loaded and isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return
    if loaded and isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.dump(tree.test):
        children = list(tree.orelse)
    for child in children:
        yield child
        yield from _nodes(child, loaded)


def _called(function: ast.expr) -> str | None:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else None


def imports_of(module: str, *, loaded: bool = False) -> set[str]:
    path = MODULES[module]
    return imports(path.read_text(), module, is_package=path.name == "__init__.py", loaded=loaded)


def roots(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def fault(module: str, imported: str) -> str | None:
    """Why ``module`` may not import ``imported``; None where it may."""
    if imported.partition(".")[0] != "phalanx":
        return None
    mine, theirs = row(module), row(imported)
    if theirs == "phalanx.compat" and mine != "phalanx.compat":
        return "nothing may use compat"
    if theirs in NEVER.get(mine, ()):
        return f"{mine} and {theirs} never import each other"
    if LAYERS.index(theirs) > LAYERS.index(mine):
        return f"{theirs} is a row below {mine}"
    return None


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_its_own_row_and_the_rows_above(module: str) -> None:
    faults = {name: why for name in imports_of(module) if (why := fault(module, name))}

    assert not faults


@pytest.mark.parametrize("module", [name for name in MODULES if row(name) not in MAY_USE_RAY])
def test_ray_is_imported_only_by_its_transport_and_the_drop_in(module: str) -> None:
    assert "ray" not in roots(imports_of(module))


@pytest.mark.parametrize("module", [name for name in MODULES if row(name) in WITHOUT_TORCH])
def test_importing_a_layer_without_tensors_never_loads_torch(module: str) -> None:
    assert "torch" not in roots(imports_of(module, loaded=True))


@pytest.mark.parametrize("module", [name for name in MODULES if row(name) != "phalanx.compat"])
def test_nothing_names_the_drop_in(module: str) -> None:
    constants = [
        node for node in ast.walk(ast.parse(MODULES[module].read_text())) if isinstance(node, ast.Constant)
    ]

    assert not [node.lineno for node in constants if "phalanx.compat" in str(node.value)]


def test_every_module_is_in_a_row_of_the_table() -> None:
    assert [name for name in MODULES if row(name) == "phalanx"] == ["phalanx"]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import ray.util", {"ray.util"}),
        ("def f():\n    import ray", {"ray"}),
        ("from . import mesh", {"phalanx.topology.mesh"}),
        ("from ..wire.codec import encode", {"phalanx.wire.codec.encode"}),
        ("from phalanx import errors", {"phalanx.errors"}),
        ("importlib.import_module('phalanx.compat.verl')", {"phalanx.compat.verl"}),
        ("if TYPE_CHECKING:\n    import torch", {"torch"}),
    ],
)
def test_every_form_of_import_is_seen(source: str, found: set[str]) -> None:
    assert imports(source, "phalanx.topology.slots") == found


def test_imports_for_type_checkers_and_in_functions_are_not_loaded_with_the_module() -> None:
    source = "if TYPE_CHECKING:\n    import torch\nelse:\n    import numpy\ndef f():\n    import ray"

    assert imports(source, "phalanx.errors", loaded=True) == {"numpy"}


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("phalanx.errors", "phalanx.config"),
        ("phalanx.topology.mesh", "phalanx.runtime.pools.pool"),
        ("phalanx.transport.inline", "phalanx.transport.ray.actors"),
        ("phalanx.execution.host", "phalanx.transport.base"),
        ("phalanx.testing.faults", "phalanx.compat.verl"),
        ("phalanx.runtime.api.group", "phalanx.WorkerGroup"),
    ],
)
def test_the_table_forbids(module: str, imported: str) -> None:
    assert fault(module, imported)


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("phalanx.topology.mesh", "phalanx.errors.DispatchError"),
        ("phalanx.runtime.api.group", "phalanx.runtime.pools.pool"),
        ("phalanx.runtime.api.group", "phalanx.transport.ray"),
        ("phalanx.compat.verl.base", "phalanx.WorkerGroup"),
        ("phalanx.runtime.api.group", "torch"),
    ],
)
def test_the_table_allows(module: str, imported: str) -> None:
    assert fault(module, imported) is None
