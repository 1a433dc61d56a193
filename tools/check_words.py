"""Check the words of docstrings, which are nouns instead of pronouns, and the names of files."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "phalanx"
MOST = {"what": 1.0, "one": 3.0, "those": 0.4, "nobody": 0.0, "whoever": 0.0}
"""Words that stand in place of a noun: most occurrences in 1,000 words of docstrings."""
OPENINGS = ("What", "Whether", "That", "Those", "Of", "How", "Who", "Where", "Which")
MOST_OPENINGS = 0.01
REPLACED = frozenset(
    """
    afterwards agreement alike arrival ask asking book booking bringing catalogue census closers copies covering decide
    door drawing dropped elsewhere ending ends execution facade finding flow following frames ground growing guard
    holding homes host journal kept leaves leaving ledger library life links look loops machine meters movers moving
    notes notices orders overdue owned pacing pairing pairs parts placed places ports posting presence probes probing
    questions recycle repeats replacing reviving runtime saving seconds settings settling setups shelf shell show sides
    sizes spread staged stages standing starting starts structure takeover team telling texts together transfer
    transport travel verbs waiters watch watchman windows wires work
    """.split()  # noqa: SIM905
)
"""Names of files for which the glossary has better words."""
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def read_docstrings(paths: list[Path]) -> dict[str, str]:
    """Return the docstrings of files by their places, such as "calls/send.py:17"."""
    found: dict[str, str] = {}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, Documented) and (text := ast.get_docstring(node)):
                found[f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"] = text
    return found


def main() -> int:
    """Print the figures and the places to change. Return 1 if a figure is above its limit."""
    # The drop-in follows verl's own words.
    paths = [path for path in sorted(ROOT.rglob("*.py")) if not path.is_relative_to(ROOT / "compat" / "verl")]
    docstrings = read_docstrings(paths)
    words = Counter(word for text in docstrings.values() for word in re.findall(r"[a-z']+", text.lower()))
    failed = False
    for word, most in MOST.items():
        rate = 1000 * words[word] / words.total()
        failed |= rate > most
        print(f"{'!' if rate > most else ' '} {word:<10} {rate:.2f} of at most {most} in 1,000 words")
    opening = re.compile(rf"\W*({'|'.join(OPENINGS)})\b")
    bad = [f"{place}: {text.splitlines()[0]}" for place, text in docstrings.items() if opening.match(text)]
    replaced = [str(path.relative_to(ROOT)) for path in paths if REPLACED & {path.stem, path.parent.name}]
    print(f"{len(bad)} of {len(docstrings)} docstrings begin with a pronoun or a question", *bad, sep="\n  ")
    print(
        f"{len(replaced)} files have a name for which the glossary has a better word", *replaced, sep="\n  "
    )
    return int(failed or len(bad) > MOST_OPENINGS * len(docstrings) or bool(replaced))


if __name__ == "__main__":
    sys.exit(main())
