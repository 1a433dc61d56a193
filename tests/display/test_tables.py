"""Tables as text and as HTML, and sizes in bytes."""

from __future__ import annotations

import pytest

from phalanx.display.tables import Table
from phalanx.display.text_format import size

TABLE = Table("ranks", ("rank", "node"), ((0, "node-0"), (1, None), (2, ["a", "b"])), ("a note",))
TEXT = """\
ranks

  rank   node
 ───────────────
  0      node-0
  1      -
  2      a, b

a note"""


@pytest.mark.parametrize("notebook", [False, True])
def test_a_table_is_rendered_as_text_also_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch, notebook: bool
) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: notebook)

    assert str(TABLE) == TEXT


def test_a_cell_can_have_several_lines_brackets_and_wide_characters_and_html_escapes_its_text() -> None:
    lines = str(Table("", ("a", "b"), (("[b]\n漢字", 0.5),))).splitlines()
    page = Table("<b>", ("<b>",), (("<b>",),))._repr_html_()

    assert lines == ["", "  a      b", " ────────────", "  [b]    0.5", "  漢字"]
    assert "&lt;b&gt;" in page and "<b>" not in page


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(1023, "1023 B"), (1024, "1.0 KiB"), (300_000_000, "286.1 MiB"), (2**60, "1048576.0 TiB")],
)
def test_a_size_has_the_unit_that_fits(nbytes: int, text: str) -> None:
    assert size(nbytes) == text
