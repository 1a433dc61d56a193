"""`phalanx runs PATH` and `phalanx trace FILE`: contents of saved steps and of a trace, without a cluster."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from phalanx.checkpoint.steps import MANIFEST, Step, listed
from phalanx.checkpoint.storage import Storage
from phalanx.cli.common import AsJson, duration, show, titled_table
from phalanx.display.text_format import first_of, size
from phalanx.errors import CheckpointError, DeclarationError
from phalanx.tracing.files import load, write
from phalanx.tracing.summary import summarize

_DAMAGED = 1
_COLORS = {"complete": "green", "damaged": "bold red", "half-written": "yellow"}

_PATH_HELP = "Path or URL of a px.checkpoint.CheckpointManager or px.save."
SavedPath = Annotated[str, typer.Argument(metavar="PATH", help=_PATH_HELP)]
Check = Annotated[bool, typer.Option("--check", help="Compare every file with its digest, by reading it.")]
TraceFile = Annotated[Path, typer.Argument(help="A trace that px.trace wrote as .json.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write the report as a self-contained page.")]


def runs(path: SavedPath, check: Check = False, as_json: AsJson = False) -> None:
    """List the saved steps of a run: sizes, ages, contents, and which are complete.

    Without --check, a file counts as complete if it exists with its original size.

    Examples:

      phalanx runs out/run

      phalanx runs s3://bucket/run --check

    Exit codes: 0 done; 1 a step is damaged; 2 nothing was saved there.
    """
    storage = Storage(path)
    steps = list(described(listed(path), check))
    if not steps:
        raise CheckpointError(
            f"nothing was saved at {storage.root}; give the path of a px.checkpoint.CheckpointManager or of px.save"
        )
    show(as_json, {"path": storage.root, "steps": steps}, render(storage.root, steps))
    if any(step["state"] == "damaged" for step in steps):
        raise typer.Exit(_DAMAGED)


def described(steps: Iterable[Step], check: bool) -> Iterator[dict[str, Any]]:
    """Yield steps as plain data, except steps that their writer removes during the check."""
    for step in steps:
        faults = step.faults
        if check and step.whole:
            faults = step.storage.differing(step.files)
            if faults and step.storage.read(MANIFEST) is None:
                continue
        written = {name: facts.size for name, facts in step.files.items()}
        texts = {name: part.get("text", "") for name, part in step.parts.items() if isinstance(part, dict)}
        yield {
            "step": step.number,
            "state": "damaged" if faults else "complete" if step.committed else "half-written",
            "faults": list(faults),
            "why": step.why,
            "at": step.at if step.serial else None,
            "seconds": step.seconds if step.serial else None,
            "bytes": sum((written if step.serial else step.storage.sizes()).values()),
            "files": len(step.files),
            "parts": {name: str(texts.get(name, "")) for name in step.parts},
            "folder": step.folder,
        }


def render(root: str, steps: Sequence[dict[str, Any]]) -> RenderableType:
    """Return the steps as a table, the last commit last, with the contents of each step below."""
    cells = [
        {
            "step": step["step"],
            "state": Text(step["state"], style=_COLORS[step["state"]]),
            "age": None if step["at"] is None else duration(time.time() - step["at"]),
            "size": size(step["bytes"]),
            "saved in": None if step["seconds"] is None else f"{step['seconds']:.2f} s",
        }
        for step in steps
    ]
    notes = [f"step {step['step']}, {line}" for step in steps for line in _contents(step)]
    return titled_table(Text(root, "bold"), cells, *notes)


def _contents(step: dict[str, Any]) -> Iterator[str]:
    """Yield the faults of a step, and a line for each part that has a text."""
    faults = step["faults"]
    if faults:
        yield step["why"] or f"missing or changed since the save: {first_of(faults, 3)}"
    for name, text in step["parts"].items():
        if text:
            yield f"{name.removeprefix('groups/').removesuffix('/worker')}: {text}"


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
