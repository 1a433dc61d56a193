"""Tables: in a terminal, in a notebook, or as data."""

from __future__ import annotations

import html
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.display.progress import rich_console
from phalanx.display.text_format import size

_UNLIMITED = 100_000  # width in columns: text outside a terminal is not wrapped


@dataclass(frozen=True)
class Table:
    """Rows under named columns, with a title and notes below. A cell may be rich's text, which has colors.

    ``str(table)`` is for terminals, a notebook shows it as HTML, ``to_dict()`` is for programs.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain data."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "notes": list(self.notes)}

    def __str__(self) -> str:
        text = io.StringIO()
        rich_console()(file=text, width=_UNLIMITED, color_system=None, force_jupyter=False).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines()).rstrip("\n")

    def __rich__(self) -> Any:
        from rich import box  # only where something is shown
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SIMPLE_HEAD)
        for name in self.columns:
            table.add_column(name, overflow="fold")
        for row, texts in zip(self.rows, self._texts(), strict=True):
            cells = zip(row, texts, strict=True)
            table.add_row(*(cell if isinstance(cell, Text) else Text(text) for cell, text in cells))
        return Group(*([Text(self.title)] if self.title else []), table, *map(Text, self.notes))

    def _repr_html_(self) -> str:
        return self.to_html('style="text-align: left; padding: 2px 10px"')  # notebooks align to the right

    def to_html(self, cell: str = "") -> str:
        """Return the table as HTML; ``cell`` is text with HTML attributes for each cell."""
        head = "".join(f"<th {cell}>{html.escape(name)}</th>" for name in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td {cell}>{html.escape(text)}</td>" for text in texts) + "</tr>"
            for texts in self._texts()
        )
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        caption = f"<caption {cell}>{html.escape(self.title)}</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"

    def _texts(self) -> Iterator[list[str]]:
        for row in self.rows:
            yield [_text(name, cell) for name, cell in zip(self.columns, row, strict=True)]


def _text(column: str, cell: Any) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, int) and "bytes" in column:
        return size(cell)
    if isinstance(cell, float):
        return f"{cell:g}"
    if isinstance(cell, Sequence) and not isinstance(cell, str):
        return ", ".join(str(item) for item in cell) or "-"
    return str(cell)
