"""Tables as text: drawn without rich where nothing has to be folded, and as rich draws them."""

from __future__ import annotations

from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from phalanx.display import tables
from phalanx.display.tables import Table

TEXTS = st.text(st.sampled_from("ab 0.,:[]-é漢\n"), max_size=30)
CELLS = st.one_of(
    TEXTS, st.none(), st.integers(), st.floats(allow_nan=False), st.lists(st.integers(), max_size=3)
)


@st.composite
def made(draw: st.DrawFn) -> Table:
    columns = tuple(draw(st.lists(TEXTS, min_size=1, max_size=4)))
    rows = draw(st.lists(st.tuples(*[CELLS] * len(columns)), max_size=5))
    return Table(draw(TEXTS), columns, tuple(rows), tuple(draw(st.lists(TEXTS, max_size=2))))


@given(made())
def test_text_is_what_rich_draws(table: Table) -> None:
    with mock.patch.object(tables, "_plain", return_value=None):
        drawn = str(table)

    assert str(table) == drawn


def test_a_table_of_plain_cells_is_not_left_to_rich() -> None:
    with mock.patch.object(Table, "_rich", side_effect=AssertionError):
        text = str(Table("ranks", ("rank", "node"), ((0, "node-0"), (1, None))))

    assert "  1      -       " in text.split("\n")
