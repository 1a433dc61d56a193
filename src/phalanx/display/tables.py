"""Tables that people read: in a terminal, in a notebook, or as data."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
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
        """The same as plain data."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "notes": list(self.notes)}

    def __str__(self) -> str:
        from rich.console import Console  # only where something is shown

        text, columns = io.StringIO(), _texts(self)
        width, plain = _width(columns), _plain(self.title, columns)
        console = Console(file=text, width=width, color_system=None)
        if plain is None:
            console.print(self._rich(), *self.notes, sep="\n")
        else:
            text.write(plain)
            console.print(*self.notes, sep="\n")
        return text.getvalue().rstrip("\n")

    def __rich__(self) -> Any:
        from rich.console import Group  # only where something is shown

        return Group(self._rich(), *self.notes)

    def _rich(self) -> Any:
        from rich import box  # only where something is shown
        from rich.table import Table as RichTable

        table = RichTable(title=self.title, title_justify="left", box=box.SIMPLE_HEAD)
        for name in self.columns:
            table.add_column(name, overflow="fold")
        for row in self.rows:
            table.add_row(*[_text(cell) for cell in row])
        return table

    def _repr_html_(self) -> str:
        head = "".join(f"<th {_CELL}>{html.escape(name)}</th>" for name in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td {_CELL}>{html.escape(_text(cell))}</td>" for cell in row) + "</tr>"
            for row in self.rows
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


_LEAST, _MOST = 80, 200  # columns of a terminal


def _texts(table: Table) -> list[list[str]]:
    """Of each column its name and its cells."""
    return [[name, *(_text(row[index]) for row in table.rows)] for index, name in enumerate(table.columns)]


def _width(columns: Sequence[Sequence[str]]) -> int:
    """Wide enough that no cell of a table of ordinary size is folded."""
    widest = [max(map(len, cells)) for cells in columns]
    return max(_LEAST, min(_MOST, sum(widest) + 3 * len(widest) + 1))  # blanks and edges of the box


def _plain(title: str, texts: Sequence[Sequence[str]]) -> str | None:
    """The table as rich draws it, where nothing is to be folded; rich takes a millisecond for each row. Else None."""
    columns: list[list[str]] = []
    for cells in texts:
        if not all(map(_is_plain, cells)):
            return None
        width = max(map(len, cells))
        columns.append([cell.ljust(width) for cell in cells])
    length = sum(len(cells[0]) for cells in columns) + 3 * len(columns) + 1
    if not columns or length > _MOST or not _is_plain(title) or not 0 < len(title) <= length:
        return None
    head, *rows = ("  " + "   ".join(cells) + "  " for cells in zip(*columns, strict=True))
    edge = " " * length
    lines = [title.ljust(length), edge, head, f" {'─' * (length - 2)} ", *rows, edge]
    return "\n".join(lines) + "\n"


def _is_plain(text: str) -> bool:
    """Whether each character is one column wide, and none means something to rich."""
    return text.isascii() and text.isprintable() and "[" not in text and text.count(":") < 2
