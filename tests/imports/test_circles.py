"""Circles of imports, of which there are none, and hidden imports, which have a reason."""

from __future__ import annotations

import ast
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import pytest

from tests.imports.source import LOADERS, MODULES, called, hidden_imports, imports

# Modules that import computed names: names given to the first two (`lazy("torch")`), modules of the users, or modules
# under verl's name.
COMPUTING = (
    "phalanx.api.lazy_names",
    "phalanx.wire.lazy",
    "phalanx.compat.verl.redirect",
    "phalanx.engines.vllm.vllm_imports",
    "phalanx.wire.exceptions",
)

Arrows = Mapping[str, set[str]]  # module -> what it imports


def arrows(sources: Mapping[str, str], *, packages: Iterable[str] = ()) -> Arrows:
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


def circles(graph: Arrows) -> Iterator[list[str]]:
    """Yield circles without a common arrow, short circles first. The first module of each is also its last."""
    left = {module: set(targets) for module, targets in graph.items()}
    while found := min(filter(None, (shortest(left, start) for start in left)), key=len, default=None):
        yield found
        for module, target in itertools.pairwise(found):
            left[module].remove(target)


def shortest(graph: Arrows, start: str) -> list[str] | None:
    """Return the shortest way from ``start`` back to it, or None."""
    reached: dict[str, str] = {}  # module -> the module before it
    waiting = deque([start])
    while waiting and start not in reached:
        module = waiting.popleft()
        for target in graph.get(module, ()):
            if target not in reached:
                reached[target] = module
                waiting.append(target)
    if start not in reached:
        return None
    way = [start]
    while len(way) == 1 or way[-1] != start:
        way.append(reached[way[-1]])
    return way[::-1]


def unexplained(source: str) -> list[int]:
    """Return lines of hidden imports of phalanx without a comment there, on the line before, or at the block."""
    lines = ["", *source.splitlines()]
    return [
        at
        for block, at in hidden_imports(source)
        if "phalanx." in lines[at] and not any("#" in lines[near] for near in (at, at - 1, block))
    ]


def packages() -> list[str]:
    return [module for module, path in MODULES.items() if path.name == "__init__.py"]


def test_modules_form_no_circle_of_imports() -> None:
    graph = arrows({module: path.read_text() for module, path in MODULES.items()}, packages=packages())

    found = [" imports ".join(circle) for circle in circles(graph)]
    assert not found, "turn one arrow of each circle of imports"


SHOWN = [m for m, p in MODULES.items() if ".compat" not in m and "lazy_names(" not in p.read_text()]


@pytest.mark.parametrize("module", SHOWN)
def test_a_hidden_import_of_phalanx_has_a_comment_with_the_reason(module: str) -> None:
    silent = unexplained(MODULES[module].read_text())

    assert not silent, "put the reason behind it, or import at the top"


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
        "class A:\n    import p.b",
        "try:\n    import p.b\nexcept ImportError:\n    pass",
        "importlib.import_module('p.b')",
        "b = lazy('p.b')",
    ],
)
def test_every_form_of_import_closes_a_circle(imported: str) -> None:
    graph = arrows({"p": "", "p.a": imported, "p.b": "def g():\n    from p.a import f"}, packages=["p"])

    assert list(circles(graph)) == [["p.a", "p.b", "p.a"]]


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        ({"p.a": "from p.a import f"}, [["p.a", "p.a"]]),
        (
            {"p.x": "import p.a", "p.a": "import p.b", "p.b": "import p.c", "p.c": "import p.a"},
            [["p.a", "p.b", "p.c", "p.a"]],
        ),
        (
            {"p.a": "import p.b, p.c", "p.b": "import p.a", "p.c": "import p.d", "p.d": "import p.a"},
            [["p.a", "p.b", "p.a"], ["p.a", "p.c", "p.d", "p.a"]],
        ),
        ({"p.a": "import p.b, p.c", "p.b": "import p.d", "p.c": "import p.d", "p.d": ""}, []),
        ({"p": "from p.a import name", "p.a": "import p.b", "p.b": ""}, []),
        ({"p": "from p.a import name", "p.a": "def f():\n    from p import name"}, [["p", "p.a", "p"]]),
    ],
    ids=[
        "a module that imports itself",
        "a long one, from anywhere outside it",
        "two, the shorter one first",
        "two ways to one place are none",
        "importing a module is no arrow to the facade above it",
        "taking a name from the facade is one to it",
    ],
)
def test_circles_of_imports_are_found_shortest_first(sources: dict[str, str], found: list[list[str]]) -> None:
    assert list(circles(arrows(sources, packages=["p"]))) == found
