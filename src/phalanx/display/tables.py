"""Tables for people: in a terminal, in a notebook, or as data."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

_CELL = 'style="text-align: left; padding: 2px 10px"'  # notebooks align to the right


@dataclass(frozen=True)
class Table:
    """Rows under named columns, with a title and notes below.

    ``str(table)`` is for terminals, a notebook shows it as HTML, ``to_dict()`` is for programs.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "notes": list(self.notes)}

    def __str__(self) -> str:
        from rich.cells import cell_len  # only where something is shown

        def padded(text: str, width: int) -> str:
            return text + " " * (width - cell_len(text))

        grid = [[text.split("\n") for text in row] for row in (self.columns, *self._texts())]
        widths = [
            max(cell_len(line) for cell in column for line in cell) for column in zip(*grid, strict=True)
        ]
        head, *rows = [
            "  " + "   ".join(padded(line, width) for line, width in zip(lines, widths, strict=True))
            for row in grid
            for lines in zip_longest(*row, fillvalue="")
        ]
        rule = " " + "─" * (sum(widths) + 3 * len(widths) - 1)
        lines = [*([self.title] if self.title else []), "", head, rule, *rows, "", *self.notes]
        return "\n".join(line.rstrip() for line in lines).rstrip("\n")

    def _texts(self) -> list[list[str]]:
        return [[_text(cell) for cell in row] for row in self.rows]

    def __rich__(self) -> Any:
        from rich import box  # only where something is shown
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=Text(self.title), title_justify="left", box=box.SIMPLE_HEAD)
        for name in self.columns:
            table.add_column(name, overflow="fold")
        for texts in self._texts():
            table.add_row(*map(Text, texts))
        return Group(table, *map(Text, self.notes))

    def _repr_html_(self) -> str:
        head = "".join(f"<th {_CELL}>{html.escape(name)}</th>" for name in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td {_CELL}>{html.escape(text)}</td>" for text in texts) + "</tr>"
            for texts in self._texts()
        )
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        caption = f"<caption {_CELL}>{html.escape(self.title)}</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"


def _text(cell: Any) -> str:
    if type(cell) in (str, int):
        return str(cell)
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:g}"
    if isinstance(cell, Sequence) and not isinstance(cell, str):
        return ", ".join(str(item) for item in cell) or "-"
    return str(cell)
