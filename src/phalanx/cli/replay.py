"""`phalanx replay FILE`: the recorded calls of one rank, alone in this process."""

from __future__ import annotations

import asyncio
import json
import pdb
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer

import phalanx
from phalanx.cli.common import AsJson
from phalanx.errors import DeclarationError
from phalanx.runtime.tools.recording import read_facts
from phalanx.runtime.tools.replay import Replay

_RAISED = 1


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What group.record wrote.")],
    method: Annotated[str | None, typer.Option("--method", "-m", help="Only calls of this method.")] = None,
    post_mortem: Annotated[
        bool, typer.Option("--pdb", help="Stop in the debugger where an exception is raised.")
    ] = False,
    stop: Annotated[
        bool, typer.Option("--break", help="Stop in the debugger at the first line of the method.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Say what the file is of; run nothing of it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run one rank's recorded calls alone in this process, with the debugger where it is asked for.

    Reading the file can run any code: only replay files whose origin you trust. --show runs none.

    Examples:

      phalanx replay call.pkl --show

      phalanx replay call.pkl --pdb

    Exit codes: 0 done; 1 the call, or the worker's constructor, raised; 2 no recording, or no such call in it.
    """
    facts = read_facts(file)
    if show and as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    if not as_json:
        typer.echo(described(facts), err=not show)
    if show:
        return
    with Replay(file) as again:
        raise typer.Exit(_run(again, facts, method, post_mortem, stop, as_json))


def described(facts: dict[str, Any]) -> str:
    """What a file is of, in a few lines."""
    classes = ", ".join(f"{role} = {name}" if role else name for role, name in facts["classes"].items())
    lines = [f"rank {facts['rank']} of {facts['world_size']} of group {facts['group']!r}: {classes}"]
    for call in facts["calls"]:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(call["at"]))
        ended = f", which raised {call['error']}" if call["error"] else ""
        lines.append(f"{call['call']}, {at}{ended}")
    state = "with" if facts["state"] else "without"
    torch = f", torch {facts['torch']}" if facts["torch"] else ""
    lines.append(f"{state} the worker's state; phalanx {facts['phalanx']}, Python {facts['python']}{torch}")
    return "\n".join(lines)


def _run(
    again: Replay, facts: dict[str, Any], method: str | None, post_mortem: bool, stop: bool, as_json: bool
) -> int:
    debugger = pdb.Pdb() if stop else None
    try:
        value = again.run(method=method, debugger=debugger)
    except DeclarationError:
        raise
    except Exception as error:
        if as_json:
            typer.echo(
                json.dumps({"recording": facts, "error": f"{type(error).__name__}: {error}"}, indent=1)
            )
        else:
            traceback.print_exception(type(error), error, _of_the_user(error.__traceback__))
        if post_mortem:
            pdb.post_mortem(sys.exc_info()[2])
        return _RAISED
    if debugger is not None and debugger.quitting:
        return 0  # there is no value
    typer.echo(json.dumps({"recording": facts, "value": repr(value)}, indent=1) if as_json else repr(value))
    return 0


def _of_the_user(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame that is neither ours nor the event loop's; all of it where there is none."""
    ours = (str(Path(phalanx.__file__).parent), str(Path(asyncio.__file__).parent))
    at = trace
    while at is not None and at.tb_frame.f_code.co_filename.startswith(ours):
        at = at.tb_next
    return at or trace
