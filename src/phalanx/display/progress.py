"""Progress for people: a bar around any iterable, and a line about the reason of a wait.

Nothing is shown outside a terminal or a notebook, or with ``PHALANX_PROGRESS=0``.
"""

from __future__ import annotations

import operator
import os
import random
import re
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from phalanx.config import settings

if TYPE_CHECKING:
    from rich.console import Console  # only where something is shown
    from rich.progress import Progress, TaskID

T = TypeVar("T")
_FRAME = re.compile(r'File "(?P<path>.+)", line (?P<line>\d+),? in (?P<function>.+)')
_PACKAGE = re.compile(r"(?:site|dist)-packages[/\\](?P<name>[^/\\.]+)")
_LIBRARY = re.compile(
    r"[/\\]lib(?:64)?[/\\]python3[^/\\]*[/\\]|<frozen |[/\\]phalanx[/\\](?:worker|backends|wire)[/\\]"
)


def progress(
    iterable: Iterable[T], *, total: int | None = None, description: str | None = None
) -> Iterator[T]:
    """Return the items of an iterable, with a bar on stderr or in the notebook that counts them.

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
    """Return the console for progress; None outside a terminal and a notebook."""
    if not settings().progress:
        return None
    console = rich_console()(stderr=True)
    return console if console.is_terminal or console.is_jupyter else None


def rich_console() -> type[Console]:
    """Return rich's ``Console``. The import of rich draws from the generator of ``random``, which stays as it was."""
    state = random.getstate()
    from rich.console import Console  # only where something is shown

    random.setstate(state)
    return Console


def bar(console: Console, transient: bool) -> Any:
    """Return a progress display with bars that count; field ``now`` of a task is the text behind its count."""
    # Only where something is shown.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    now = TextColumn("{task.fields[now]}", style="dim", markup=False)
    counts = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    columns = (TextColumn("{task.description}", markup=False), *counts, now)
    # Output into a file would be redirected to the terminal while a bar is there.
    shown = Progress(*columns, console=console, transient=transient, redirect_stdout=sys.stdout.isatty())
    return NotebookBar(shown, transient) if console.is_jupyter else shown


class NotebookBar:
    """rich's ``Progress`` as an output of a notebook, shown anew at each change.

    rich itself needs ipywidgets there, which are missing in many notebooks.
    """

    def __init__(self, shown: Progress, transient: bool) -> None:
        self._shown, self._transient = shown, transient
        self._handle: Any = None
        self._next = 0.0  # time of the next drawing, which takes milliseconds

    def __enter__(self) -> NotebookBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            last = {"text/plain": ""} if self._transient else self._shown
            self._handle.update(last, raw=self._transient)

    def add_task(self, description: str, **fields: Any) -> TaskID:
        """Begin the bar."""
        from IPython.display import display  # in a notebook it is there  # pyright: ignore[reportMissingImports]

        task = self._shown.add_task(description, **fields)
        self._handle = display(self._shown, display_id=True)
        return task

    def update(self, task: TaskID, **changed: Any) -> None:
        """Change the bar; show it, ten times a second at most."""
        self._shown.update(task, **changed)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + 0.1
            self._handle.update(self._shown)


def place(stack: str) -> str:
    """Describe where a process is: the package that it imports, else the innermost frame of the user's code.

    ``stack`` is as ``faulthandler`` writes it, innermost first. The result is empty if nothing is known.
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
