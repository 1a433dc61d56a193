"""Code blocks of the documentation's pages."""

from __future__ import annotations

import re
import socket
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)``` *$", re.MULTILINE | re.DOTALL
)
_BACKEND = re.compile(r"^<!-- backend: (inline|ray) -->", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, whose text begins at ``line``."""

    page: Path
    line: int
    language: str
    title: str
    text: str
    raw: str
    """The text with its indentation."""

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    return sorted(DOCS.rglob("*.md"))


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).with_suffix("").as_posix()


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page, in order."""
    source = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(source):
        info = found["info"].strip()
        title = re.search(r'title="([^"]*)"', info)
        line = source.count("\n", 0, found.start("text")) + 1
        language = re.split(r"[ {]", info, maxsplit=1)[0]
        yield Block(
            page, line, language, title[1] if title else "", textwrap.dedent(found["text"]), found["text"]
        )


def backend_of(page: Path) -> str:
    """Return the backend of the page's code: inline, unless a comment on the page says ray."""
    found = _BACKEND.search(page.read_text(encoding="utf-8"))
    return found[1] if found else "inline"


def same_output(shown: str, printed: str) -> bool:
    """Return whether ``printed`` matches the output that the page shows.

    ``...`` matches any text. Blanks may differ, and values that depend on the machine or the run: names of hosts
    (on the pages: node-1), accelerators, ids of nodes and processes, numbers of pools and groups. Lines of ranks are
    left out, because they come at any time.
    """
    pattern, before = "", "..."
    for word in _anywhere(shown).split():
        blanks = r"\s*" if "..." in (word, before) else r"\s+"
        pattern, before = pattern + blanks + re.escape(word).replace(re.escape("..."), ".*?"), word
    return re.fullmatch(pattern + r"\s*", _anywhere(printed), re.DOTALL) is not None


def _anywhere(text: str) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "node-1", text)
    text = re.sub(r"^\[\S+ r\d+@[^\]\n]*\] .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r", GPU \d+\)", ")", text)
    text = re.sub(r"\bGPU \d+", "CPU", text)
    text = re.sub(r"\b[0-9a-f]{8}\b", "ID", text)
    text = re.sub(r"(?<=\w)-\d+\b", "-N", text)
    return re.sub(r"─+", "─", re.sub(r"\b\d{3,}\b", "N", text))
