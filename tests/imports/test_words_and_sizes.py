"""Docstrings name the thing that they are about, and packages do not grow."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.imports.source import MODULES

#: Words that stand in place of a noun, with how often they may occur among 1,000 words of docstrings.
MOST = {"what": 1.0, "one": 3.0, "those": 0.4, "nobody": 0.0, "whoever": 0.0}
#: Lines of code, without docstrings, comments and empty lines: to be lowered when a package gets smaller.
LINES = {
    "api": 1190,
    "backends": 2200,
    "calls": 2195,
    "channels": 2140,
    "checkpoint": 1950,
    "cli": 930,
    "collect": 540,
    "compat": 2275,
    "debug": 670,
    "declare": 1045,
    "dispatch": 1090,
    "display": 360,
    "engines": 1760,
    "group": 810,
    "members": 950,
    "parallel": 390,
    "pools": 400,
    "session": 615,
    "testing": 260,
    "topology": 825,
    "tracing": 1105,
    "weights": 2880,
    "wire": 1340,
    "worker": 1720,
}
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def docstrings() -> Iterator[str]:
    for name, tree in TREES.items():
        if not name.startswith("phalanx.compat.verl"):  # which follows verl's own words
            for node in ast.walk(tree):
                if isinstance(node, Documented):
                    yield ast.get_docstring(node) or ""


def code_lines(name: str) -> int:
    """Count the lines of a module that hold code."""
    text = MODULES[name].read_text().splitlines()
    lines = {number for number, line in enumerate(text, 1) if not re.match(r"\s*(#|$)", line)}
    for node in ast.walk(TREES[name]):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and type(node.value.value) is str
        ):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_docstrings_name_the_noun_and_begin_with_it_or_a_verb() -> None:
    texts = [text for text in docstrings() if text]
    words = Counter(found for text in texts for found in re.findall(r"[a-z']+", text.lower()))
    badly = [text.partition("\n")[0] for text in texts if re.match(r"\W*(What|Whether|That)\b", text)]
    often = {word: 1000 * words[word] / words.total() for word in MOST}

    assert {word: count for word, count in often.items() if count > MOST[word]} == {}
    assert len(badly) <= 0.01 * len(texts), badly


@pytest.mark.parametrize("package", LINES)
def test_a_package_does_not_grow(package: str) -> None:
    modules = [
        name for name in MODULES if name.startswith(f"phalanx.{package}.") or name == f"phalanx.{package}"
    ]
    assert sum(map(code_lines, modules)) <= LINES[package]
