"""`phalanx trace FILE`: what a trace says, in the terminal, as a page or as data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from phalanx.display.tables import Table
from phalanx.errors import DeclarationError
from phalanx.tracing.files import load, write
from phalanx.tracing.report import Report, report

ROWS = 12
_WIDE = 160


def trace(
    file: Annotated[Path, typer.Argument(help="A trace that px.trace wrote as .json or .jsonl.")],
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the report as a page that needs nothing else.")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", help="Write the trace in another format: .json, .jsonl or .html."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Print every row of long tables.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Report of a trace: time by method, skew, slowest ranks, idle accelerators, bytes, failures.

    Examples:

      phalanx trace run.json

      phalanx trace run.json --html report.html

      phalanx trace run.json --json | jq .skew
    """
    try:
        found = load(file)
        made = report(found)
        for path in (html, to):
            if path is not None:
                write(found, path if path is to else _page(path))
    except OSError as error:
        raise DeclarationError(f"{error.filename or file}: {error.strerror or error}") from error
    if as_json:
        typer.echo(json.dumps(made.to_dict(), indent=1, default=str))
    elif html is None and to is None:
        print_report(made, None if every else ROWS)
    else:
        for path in (html, to):
            if path is not None:
                typer.echo(f"written: {path}")


def _page(path: Path) -> Path:
    if path.suffix != ".html":
        raise DeclarationError(f"--html {path}: expected a path that ends in .html")
    return path


def print_report(made: Report, rows: int | None = ROWS) -> None:
    """Print a report's tables, no more than so many rows of each."""
    terminal = Console(highlight=False)
    if not terminal.is_terminal:  # a file or a pipe has room
        terminal.width = max(terminal.width, _WIDE)
    terminal.print(f"[bold]{made.title}[/bold]\n")
    for table in made.tables:
        terminal.print(_rich(table, rows))
    for note in made.notes:
        terminal.print(note, markup=False)


def _rich(table: Table, rows: int | None) -> Any:
    """The table with numbers to the right, names kept whole, and no more than so many rows."""
    shown = table.rows[:rows]
    left_out = len(table.rows) - len(shown)
    made = RichTable(
        title=table.title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption=f"and {left_out} more rows: --all shows them" if left_out else None,
        caption_justify="left",
    )
    for index, name in enumerate(table.columns):
        numeric = all(isinstance(row[index], int | float | None) for row in shown)
        made.add_column(name, justify="right" if numeric else "left", no_wrap=index == 0, overflow="fold")
    for row in shown:
        made.add_row(*[_text(cell) for cell in row])
    return made


def _text(cell: Any) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if cell >= 1000 else f"{cell:.3g}"
    if isinstance(cell, int):
        return f"{cell:,}"
    return escape(", ".join(map(str, cell)) if isinstance(cell, list | tuple) else str(cell))
