"""`phalanx trace FILE`: the summary of a trace in the terminal, as a page or as data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.common import AsJson, show
from phalanx.errors import DeclarationError
from phalanx.tracing.files import load, write
from phalanx.tracing.summary import summarize

TraceFile = Annotated[Path, typer.Argument(help="A trace that px.trace wrote as .json.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write the report as a self-contained page.")]


def trace(file: TraceFile, html: Html = None, as_json: AsJson = False) -> None:
    """Summarize a trace: calls, p50 and p95 of their times, and bytes by method; and the idle share of each rank.

    Examples:

      phalanx trace run.json

      phalanx trace run.json --html report.html

      phalanx trace run.json --json | jq .methods
    """
    if html is not None and html.suffix != ".html":
        raise DeclarationError(f"--html {html}: expected a path that ends in .html")
    try:
        found = load(file)
        if html is not None:
            write(found, html)
    except OSError as error:
        raise DeclarationError(f"{error.filename or file}: {error.strerror or error}") from error
    summary = summarize(found)
    show(as_json, summary.to_dict(), f"written: {html}" if html is not None else str(summary))
