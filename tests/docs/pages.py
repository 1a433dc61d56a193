"""The code of the documentation's pages, as readers see it."""

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
    """One fenced block: its language and title, its text, the line of the page at which the text begins."""

    page: Path
    line: int
    language: str
    title: str
    text: str
    raw: str
    """The text with the blanks in front of its lines."""

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """All pages of the site."""
    return sorted(DOCS.rglob("*.md"))


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).with_suffix("").as_posix()


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
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
    """What the page's code runs on: inline, unless a comment on the page says ray."""
    found = _BACKEND.search(page.read_text(encoding="utf-8"))
    return found[1] if found else "inline"


def same_output(shown: str, printed: str) -> bool:
    """Whether ``printed`` is what the page shows.

    ``...`` stands for anything; blanks may differ, and so may what differs between machines and runs: names of hosts
    (on the pages: node-1), accelerators, ids of nodes and processes, numbers of pools and groups. What ranks
    print comes when it comes, and is left out.
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
