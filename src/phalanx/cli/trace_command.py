"""`phalanx trace FILE`: the summary of a trace in the terminal, as a page or as data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.common import AsJson, show
from phalanx.errors import DeclarationError
from phalanx.tracing.files import check_path, load, write
from phalanx.tracing.summary import summarize

TraceFile = Annotated[Path, typer.Argument(help="A trace that px.trace wrote as .json or .jsonl.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write the report as a self-contained page.")]
To = Annotated[Path | None, typer.Option("--to", help="Write it in another format: .json, .jsonl, .html.")]


def trace(file: TraceFile, html: Html = None, to: To = None, as_json: AsJson = False) -> None:
    """Summarize a trace: calls, p50 and p95 of their times, and bytes by method; and the idle share of each rank.

    Examples:

      phalanx trace run.json

      phalanx trace run.json --html report.html

      phalanx trace run.json --json | jq .methods
    """
    if html is not None and html.suffix != ".html":
        raise DeclarationError(f"--html {html}: expected a path that ends in .html")
    if to is not None:
        check_path(to)  # before any file is written
    try:
        found = load(file)
        written = [write(found, path) for path in (html, to) if path is not None]
    except OSError as error:
        raise DeclarationError(f"{error.filename or file}: {error.strerror or error}") from error
    summary = summarize(found)
    show(as_json, summary.to_dict(), "\n".join(f"written: {path}" for path in written) or str(summary))
