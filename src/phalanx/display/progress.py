"""Progress on the terminal: a bar around any iterable, and the place in the code where a process is.

Nothing is shown outside a terminal, or with ``PHALANX_PROGRESS=0``.
"""

from __future__ import annotations

import operator
import os
import random
import re
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from phalanx.config import settings

if TYPE_CHECKING:
    from rich.console import Console  # only where something is shown
    from rich.progress import Progress

T = TypeVar("T")
_FRAME = re.compile(r'File "(?P<path>.+)", line (?P<line>\d+),? in (?P<function>.+)')
_PACKAGE = re.compile(r"(?:site|dist)-packages[/\\](?P<name>[^/\\.]+)")
_LIBRARY = re.compile(
    r"[/\\]lib(?:64)?[/\\]python3[^/\\]*[/\\]|<frozen |[/\\]phalanx[/\\](?:worker|backends|wire)[/\\]"
)


def progress(
    iterable: Iterable[T], *, total: int | None = None, description: str | None = None
) -> Iterator[T]:
    """Yield the items of an iterable, with a bar on stderr that counts them.

        for rank, output in px.debug.progress(group.generate.submit(prompts).stream()):
            ...

    Args:
        iterable: anything to iterate over; the streams of calls know how many ranks they wait for.
        total: number of items, if the iterable does not know it; without a number the bar only counts.
        description: text before the bar; for the stream of a call its group and method.
    """
    count = total if total is not None else operator.length_hint(iterable, -1)
    text = description if description is not None else str(getattr(iterable, "description", ""))
    console = terminal()
    if console is None:
        yield from iterable
        return
    with bar(console, transient=False) as shown:
        task = shown.add_task(text, total=count if count >= 0 else None, now="")
        for item in iterable:
            yield item
            shown.update(task, advance=1)


def terminal() -> Console | None:
    """Return the console for progress; None outside a terminal, or with ``PHALANX_PROGRESS=0``."""
    if not settings().progress:
        return None
    console = rich_console()(stderr=True)
    # With FORCE_COLOR a notebook counts as a terminal to rich, which can draw there only with ipywidgets.
    return console if console.is_terminal and not console.is_jupyter else None


def rich_console() -> type[Console]:
    """Return rich's ``Console``. The import of rich uses the generator of ``random``, whose state is restored."""
    state = random.getstate()
    from rich.console import Console  # only where something is shown

    random.setstate(state)
    return Console


def bar(console: Console, transient: bool) -> Progress:
    """Return a progress display with bars that count; field ``now`` of a task is the text behind its count."""
    # Only where something is shown.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    now = TextColumn("{task.fields[now]}", style="dim", markup=False)
    counts = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    columns = (TextColumn("{task.description}", markup=False), *counts, now)
    # Output into a file would be redirected to the terminal while a bar is there.
    return Progress(*columns, console=console, transient=transient, redirect_stdout=sys.stdout.isatty())


def place(stack: str) -> str:
    """Describe where a process is: the package that it imports, else the innermost frame of the user's code.

    ``stack`` is the output of ``faulthandler``, innermost frame first. The result is empty if it has no frames.
    """
    frames = [frame for frame in map(_FRAME.search, stack.splitlines()) if frame]
    importing = False
    for frame in reversed(frames):
        importing = importing or "importlib" in frame["path"]
        package = _PACKAGE.search(frame["path"])
        if importing and package and frame["function"].strip() == "<module>":
            return f"importing {package['name']}"
    own = [f for f in frames if not _LIBRARY.search(f["path"]) and not _PACKAGE.search(f["path"])]
    for frame in (own or frames)[:1]:
        return f"{frame['function'].strip()} at {os.path.basename(frame['path'])}:{frame['line']}"
    return ""
