"""`phalanx trace FILE`: the summary of a trace in the terminal, as a page or as data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from phalanx.errors import DeclarationError
from phalanx.tracing.files import load, write
from phalanx.tracing.summary import summarize

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
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Summary of a trace: per method calls, p50 and p95 of their times, bytes, and the idle share of each rank.

    Examples:

      phalanx trace run.json

      phalanx trace run.json --html report.html

      phalanx trace run.json --json | jq .methods
    """
    try:
        found = load(file)
        summary = summarize(found)
        for path in (html, to):
            if path is not None:
                write(found, path if path is to else _page(path))
    except OSError as error:
        raise DeclarationError(f"{error.filename or file}: {error.strerror or error}") from error
    if as_json:
        typer.echo(json.dumps(summary.to_dict(), indent=1, default=str))
    elif html is None and to is None:
        terminal = Console(highlight=False)
        if not terminal.is_terminal:  # a file or a pipe has room
            terminal.width = max(terminal.width, _WIDE)
        terminal.print(summary)
    else:
        for path in (html, to):
            if path is not None:
                typer.echo(f"written: {path}")


def _page(path: Path) -> Path:
    if path.suffix != ".html":
        raise DeclarationError(f"--html {path}: expected a path that ends in .html")
    return path
