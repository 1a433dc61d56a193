"""`phalanx runs PATH`: what a run has saved."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.checkpoint.path_lock import holder_of
from phalanx.checkpoint.steps import MANIFEST, FoundStep, listed, read_step
from phalanx.checkpoint.storage import Storage
from phalanx.cli.common import AsJson
from phalanx.display.byte_format import size
from phalanx.errors import CheckpointCorrupted, CheckpointError

_DAMAGED = 1
_SHOWN_FAULTS = 3
_NARROW = 80
"""Columns of a terminal below which what is in the steps stands under the table."""


def runs(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="What px.checkpoint.CheckpointManager or px.save wrote: a path or a URL."
        ),
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Compare every file with its digest, by reading it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """What a run has saved: steps, sizes, ages, what is in each, which are whole, and who writes there.

    Without --check, a file counts as whole if it is there and as long as it was.

    Examples:

      phalanx runs out/run

      phalanx runs s3://bucket/run --check

    Exit codes: 0 done; 1 a step is damaged; 2 nothing was saved there.
    """
    storage = Storage(path)
    found = [looked_at(path, storage, one, check) for one in listed(path)]
    steps = [step for step in found if step is not None]
    if not steps:
        raise CheckpointError(
            f"nothing was saved at {storage.root}; give the path of a px.checkpoint.CheckpointManager or of px.save"
        )
    if as_json:
        typer.echo(json.dumps({"path": storage.root, "holder": holder_of(storage), "steps": steps}, indent=1))
    else:
        show(Console(), storage, steps, time.time())
    if any(step["state"] == "damaged" for step in steps):
        raise typer.Exit(_DAMAGED)


def looked_at(path: str, storage: Storage, found: FoundStep, check: bool) -> dict[str, Any] | None:
    """A step as plain data; None where it is removed meanwhile by who writes there."""
    manifest, faults = found.manifest, found.faults
    if check and found.whole:
        try:
            read_step(path, found.step).check()
        except CheckpointCorrupted as error:
            faults = error.files
        except CheckpointError:
            if not storage.exists(f"{found.folder}/{MANIFEST}"):
                return None
            raise
    state = "damaged" if faults else "whole" if found.committed else "half-written"
    files = {name: facts.size for name, facts in manifest.files.items()} if manifest is not None else {}
    return {
        "step": found.step,
        "state": state,
        "faults": list(faults),
        "why": found.why,
        "at": None if manifest is None else manifest.at,
        "seconds": None if manifest is None else manifest.seconds,
        "bytes": sum(files.values()) if manifest is not None else _bytes_there(storage, found.folder),
        "files": len(files),
        "parts": {} if manifest is None else {name: _text(facts) for name, facts in manifest.parts.items()},
        "folder": f"{storage.root}/{found.folder}",
    }


def show(console: Console, storage: Storage, steps: Sequence[dict[str, Any]], now: float) -> None:
    """The steps as a table, the last commit last."""
    table = Table(title=storage.root, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    table.add_column("step", justify="right")
    for name in ("state", "age", "size", "saved in"):
        table.add_column(name, no_wrap=True)
    narrow = console.width < _NARROW
    if not narrow:
        table.add_column("what is in it", overflow="fold", ratio=1)
    below: list[str] = []
    colours = {"whole": "green", "damaged": "bold red", "half-written": "yellow"}
    for step in steps:
        lines = [f"{_shown(name)}: {text}" for name, text in step["parts"].items() if text]
        faults = step["faults"]
        if faults:
            more = f" and {len(faults) - _SHOWN_FAULTS} more" if len(faults) > _SHOWN_FAULTS else ""
            shown = ", ".join(faults[:_SHOWN_FAULTS])
            lines.insert(0, step["why"] or f"missing, or not what was written: {shown}{more}")
        cells = [
            str(step["step"]),
            Text(step["state"], style=colours[step["state"]]),
            "-" if step["at"] is None else _age(now - step["at"]),
            size(step["bytes"]),
            "-" if step["seconds"] is None else f"{step['seconds']:.2f} s",
            Text("\n".join(lines) or "-"),
        ]
        table.add_row(*cells[: len(table.columns)])
        below += [f"step {step['step']}, {line}" for line in lines] if narrow else []
    console.print(table)
    for line in below:
        console.print(line, highlight=False, markup=False)
    who = holder_of(storage)
    if who is not None:
        console.print(who, highlight=False)


def _bytes_there(storage: Storage, folder: str) -> int:
    return sum(storage.sizes(folder).values())


def _text(facts: Any) -> str:
    return str(facts.get("text", "")) if isinstance(facts, dict) else ""


def _shown(part: str) -> str:
    """The name of a part as its owner knows it: of a group that has no roles, the group's alone."""
    return part.removeprefix("groups/").removesuffix("/worker")


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{max(seconds, 0):.0f} s"
