"""Tables of docs/reference/verl.md, and the names that the source of verl uses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "verl.md"
CONTROLLER = "verl.single_controller"


def table(heading: str) -> dict[str, set[str]]:
    """Return the names by module or class that the page lists under a heading."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", section, re.MULTILINE)
    return {first: set(re.findall(r"`([^`]+)`", rest)) for first, rest in rows}


def outside(verl: Path) -> Iterator[ast.AST]:
    """Yield the nodes of all modules of verl outside its controller."""
    for file in sorted(verl.rglob("*.py")):
        if file.relative_to(verl).parts[0] != "single_controller":
            yield from ast.walk(ast.parse(file.read_text(encoding="utf-8")))


def imported(nodes: Iterator[ast.AST]) -> set[tuple[str, str]]:
    """Return module and name of each import from the controller. An imported module has no name."""
    found: set[tuple[str, str]] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(CONTROLLER):
            found |= {(node.module or "", alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names if alias.name.startswith(CONTROLLER)}
    return found


def defined(folder: Path) -> dict[str, set[str]]:
    """Return the methods and attributes that modules of a folder define, by class."""
    found: dict[str, set[str]] = {}
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(_members(node))
    return found


def _members(cls: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(cls):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def touched(nodes: Iterator[ast.AST], classes: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the names that classes of the controller define and other modules use, by class."""
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    found = {
        cls: {name for name in names & used if not name.startswith("__")} for cls, names in classes.items()
    }
    return {cls: names for cls, names in found.items() if names and cls not in ("Dispatch", "Execute")}
