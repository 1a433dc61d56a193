"""Circles of imports, of which there are none, and hidden imports, which have a reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.imports.source import LOADERS, MODULES, called, imports

# Modules that import computed names: names given to the first two (`lazy("torch")`), modules of the users, or modules
# under verl's name.
COMPUTING = (
    "phalanx.api.lazy_names",
    "phalanx.wire.value",
    "phalanx.compat.verl.overlay",
    "phalanx.wire.exceptions",
)


def arrows(sources: Mapping[str, str], *, packages: Iterable[str] = ()) -> Mapping[str, set[str]]:
    """Return the imports among ``sources`` (module -> text), at any depth, under TYPE_CHECKING and in functions too.

    Importing ``a.b.c`` is an arrow to ``a.b.c``, not to the facades of ``a`` and ``a.b``, which hold no code; a name
    taken from a facade is an arrow to the facade.
    """
    found: dict[str, set[str]] = {}
    for module, text in sources.items():
        names = imports(text, module, is_package=module in packages)
        targets = {name if name in sources else name.rpartition(".")[0] for name in names} & sources.keys()
        found[module] = targets - {module} if module in packages else targets
    return found


def unexplained(source: str) -> list[int]:
    """Return lines of indented imports of phalanx without a comment there, on the line before, or at the block."""
    lines = ["", *source.splitlines()]
    silent, block = list[int](), 0
    for at, line in enumerate(lines):
        block = at if re.match("def |    def |if TYPE_CHECKING", line) else block
        if re.match(r" +(from|import) phalanx\.", line) and not any(
            "#" in lines[n] for n in (at, at - 1, block)
        ):
            silent.append(at)
    return silent


def test_modules_form_no_circle_of_imports() -> None:
    sources = {module: path.read_text() for module, path in MODULES.items()}
    packages = [module for module, path in MODULES.items() if path.name == "__init__.py"]
    TopologicalSorter(arrows(sources, packages=packages)).prepare()  # its error names a circle


def test_a_hidden_import_of_phalanx_has_a_comment_with_the_reason() -> None:
    sources = {m: path.read_text() for m, path in MODULES.items() if ".compat" not in m}
    silent = [(m, unexplained(text)) for m, text in sources.items() if "lazy_names(" not in text]

    assert not [found for found in silent if found[1]], "put the reason behind it, or import at the top"


@pytest.mark.parametrize(
    ("source", "silent"),
    [
        ("import phalanx.a", []),
        ("def f():\n    import phalanx.a", [2]),
        ("def f():\n    import phalanx.a  # loads Ray", []),
        ("def f():\n    # It loads Ray.\n    import phalanx.a", []),
        ("if TYPE_CHECKING:\n    from phalanx.a import b", [2]),
        ("if TYPE_CHECKING:  # loads Ray\n    import phalanx.a\n    import phalanx.b", []),
        ("def f():\n    import torch", []),
    ],
)
def test_hidden_imports_without_a_comment_are_found(source: str, silent: list[int]) -> None:
    assert unexplained(source) == silent


def test_only_listed_modules_import_computed_names() -> None:
    computing = {
        module
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and called(node) in LOADERS
        and not isinstance(node.args[0], ast.Constant)
    }

    assert computing == {*COMPUTING}


@pytest.mark.parametrize(
    "imported",
    [
        "import p.b",
        "from p.b import name",
        "from p import b",
        "from . import b",
        "from .b import name",
        "from ..p.b import name",
        "def f():\n    from p.b import name",
        "if TYPE_CHECKING:\n    from p.b import name",
        "importlib.import_module('p.b')",
        "b = lazy('p.b')",
    ],
)
def test_every_form_of_import_closes_a_circle(imported: str) -> None:
    graph = arrows({"p": "", "p.a": imported, "p.b": "def g():\n    from p.a import f"}, packages=["p"])

    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()
