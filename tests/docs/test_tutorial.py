"""The tutorial's pages show the code of its scripts, which tests/examples runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, blocks, name_of

SCRIPTS = sorted((ROOT / "examples" / "tutorial").glob("*.py"))
CHAPTERS = sorted((DOCS / "tutorial").glob("[0-9]*.md"))


def test_every_script_has_a_chapter() -> None:
    assert [page.name.split("-")[0] for page in CHAPTERS] == [str(int(s.name.split("_")[0])) for s in SCRIPTS]


@pytest.mark.parametrize(("page", "script"), zip(CHAPTERS, SCRIPTS, strict=True), ids=map(name_of, CHAPTERS))
def test_the_code_of_a_chapter_is_part_of_its_script(page: Path, script: Path) -> None:
    source = script.read_text(encoding="utf-8")
    code = [block for block in blocks(page) if block.language == "python"]

    assert f"`examples/tutorial/{script.name}`" in page.read_text(encoding="utf-8")
    assert code
    assert [block.where for block in code if block.raw not in source] == []
