"""Tables as text, for rich, and as HTML."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from phalanx.display.tables import Table

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
def test_a_table_is_drawn_as_text(monkeypatch: pytest.MonkeyPatch, notebook: bool) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: notebook)

    assert str(TABLE) == TEXT


def test_a_cell_of_several_lines_takes_as_many() -> None:
    lines = str(Table("", ("a", "b"), (("one\ntwo", 0.5),))).splitlines()

    assert lines == ["", "  a     b", " ───────────", "  one   0.5", "  two"]


@given(st.lists(st.tuples(st.text("ab [é漢", min_size=1, max_size=9), st.integers()), min_size=1, max_size=5))
def test_columns_are_as_wide_as_their_widest_cell(rows: list[tuple[str, int]]) -> None:
    widest = max(cell_len(text) for text, _ in rows)

    for (_, number), line in zip(
        rows, str(Table("t", ("x", "n"), tuple(rows))).splitlines()[4:], strict=True
    ):
        assert cell_len(line) == 2 + widest + 3 + len(str(number))


def test_html_escapes_what_is_in_the_cells() -> None:
    assert "&lt;b&gt;" in Table("<b>", ("<b>",), (("<b>",),))._repr_html_()
    assert "<b>" not in Table("<b>", ("<b>",), (("<b>",),))._repr_html_()
