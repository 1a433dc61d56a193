"""Check that the source and the tests are no larger than their ceilings, in code lines, files, classes and tokens.

A code line is neither blank nor a comment nor part of a docstring. A ceiling is lowered when a package gets smaller,
and raised only with a reason in the commit.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "errors config": 286,
    "topology": 715,
    "wire": 1165,
    "tracing display": 1365,
    "declare dispatch collect": 2622,
    "backends": 2143,
    "worker": 1324,
    "session pools group calls members": 4530,
    "weights": 2784,
    "channels": 2057,
    "checkpoint": 1859,
    "api debug data": 1777,
    "parallel engines": 1736,
    "compat": 1873,
    "cli testing __init__ __main__": 1093,
}
"""Most code lines by packages and modules of ``phalanx``."""
TOTALS = {
    "code lines": 27_400,
    "files": 225,
    "classes": 464,
    "tokens": 259_840,
    "functions over 60 lines": 4,
    "lines of tests": 32_000,
    "lines of benchmark, examples and tools": 8_500,
}
_NO_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
}


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines of docstrings, also of those of attributes."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def measure(path: Path) -> Counter[str]:
    """Return the figures of a file."""
    text = path.read_text()
    tree = ast.parse(text)
    lines = enumerate(text.splitlines(), 1)
    code = {
        number for number, line in lines if line.strip() and not line.lstrip().startswith("#")
    } - docstring_lines(tree)
    figures = Counter({"files": 1, "code lines": len(code)})
    with path.open("rb") as file:
        tokens = (token for token in tokenize.tokenize(file.readline) if token.type not in _NO_TOKENS)
        figures["tokens"] = sum(token.start[0] in code for token in tokens)
    for node in ast.walk(tree):
        figures["classes"] += isinstance(node, ast.ClassDef)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            figures["functions over 60 lines"] += (node.end_lineno or 0) - node.lineno >= 60
    return figures


def count_lines(*folders: str) -> int:
    """Return the number of lines of all Python files in folders of the project."""
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sum(len(path.read_text().splitlines()) for path in files)


def main() -> int:
    """Print each figure with its ceiling. Return 1 if a figure is above it."""
    source = ROOT / "src" / "phalanx"
    totals: Counter[str] = Counter()
    packages: Counter[str] = Counter()
    for path in source.rglob("*.py"):
        figures = measure(path)
        totals += figures
        packages[path.relative_to(source).parts[0].removesuffix(".py")] += figures["code lines"]
    totals["lines of tests"] = count_lines("tests")
    totals["lines of benchmark, examples and tools"] = count_lines("bench", "examples", "tools")
    rows = [(name, totals[name], most) for name, most in TOTALS.items()]
    rows += [
        (name, sum(packages.pop(one, 0) for one in name.split()), most) for name, most in PACKAGES.items()
    ]
    rows += [(f"{name} (no ceiling)", lines, 0) for name, lines in packages.items()]
    for name, figure, most in rows:
        print(f"{'!' if figure > most else ' '} {name:<40} {figure:>7} of at most {most}")
    return int(any(figure > most for _, figure, most in rows))


if __name__ == "__main__":
    sys.exit(main())
