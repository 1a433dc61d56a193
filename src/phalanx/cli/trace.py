"""`phalanx trace FILE`: what a trace says, in the terminal, as a page or as data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from phalanx.errors import DeclarationError
from phalanx.observe.files import load, write
from phalanx.observe.report import report


def trace(
    file: Annotated[Path, typer.Argument(help="A trace that px.trace wrote as .json or .jsonl.")],
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the report as a page that needs nothing else.")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", help="Write the trace in another format: .json, .jsonl, .pftrace or .html."),
    ] = None,
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
        from rich.console import Console

        Console(highlight=False).print(made)
    else:
        for path in (html, to):
            if path is not None:
                typer.echo(f"written: {path}")


def _page(path: Path) -> Path:
    if path.suffix != ".html":
        raise DeclarationError(f"--html {path}: expected a path that ends in .html")
    return path
