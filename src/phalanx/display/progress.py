"""Progress for people: a bar around any iterable, and one line about what a wait is for.

Nothing is shown where nobody looks: outside a terminal or a notebook, or with ``PHALANX_PROGRESS=0``.
"""

from __future__ import annotations

import operator
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from phalanx.config import settings

if TYPE_CHECKING:
    from rich.console import Console  # only where something is shown

T = TypeVar("T")
_FRAME = re.compile(r'File "(?P<path>.+)", line (?P<line>\d+),? in (?P<function>.+)')
_CELLS = 20
_PACKAGES = re.compile(r"(?:site|dist)-packages[/\\](?P<name>[^/\\.]+)")
_LIBRARY = re.compile(
    r"[/\\]lib(?:64)?[/\\]python3[^/\\]*[/\\]|<frozen |[/\\]phalanx[/\\](?:worker|backends|wire)[/\\]"
)


def progress(
    iterable: Iterable[T], *, total: int | None = None, description: str | None = None
) -> Iterator[T]:
    """The items of an iterable, with a bar on stderr or in the notebook that counts them.

        for rank, output in px.debug.progress(group.generate.submit(prompts).stream()):
            ...

    Args:
        iterable: anything to iterate over; the streams of calls know how many ranks they wait for.
        total: number of items, where the iterable does not know it; without one the bar only counts.
        description: what stands before the bar; for the stream of a call its group and method.
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
            shown.advance(task)


def terminal() -> Console | None:
    """Where progress is shown; None where nobody looks."""
    if not settings().progress:
        return None
    from rich.console import Console  # only where something is shown

    console = Console(stderr=True)
    return console if console.is_terminal or console.is_jupyter else None


def bar(console: Console, transient: bool) -> Any:
    """Bars of counted things; field ``now`` of a task stands behind its count."""
    if console.is_jupyter:
        return NotebookBar(transient)
    # Only where something is shown.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[now]}", markup=True),
        console=console,
        transient=transient,
        # Else what goes into a file would be redirected to the terminal while a bar is there.
        redirect_stdout=sys.stdout.isatty(),
    )


class NotebookBar:
    """What is used of rich's progress, as one line of a notebook's output that is written anew.

    rich needs ipywidgets there, which neither every notebook has nor everything that shows one.
    """

    def __init__(self, transient: bool) -> None:
        self._transient = transient
        self._handle: Any = None
        self._begun = time.monotonic()
        self._text = self._now = ""
        self._total: int | None = None
        self._done = 0

    def __enter__(self) -> NotebookBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None and self._transient:
            self._handle.update({"text/plain": ""}, raw=True)

    def add_task(self, description: str, *, total: int | None, now: str) -> int:
        """Begin the line."""
        self._text, self._total, self._now = description, total, now
        self._show()
        return 0

    def advance(self, task: int) -> None:
        """Count one more."""
        self.update(task, completed=self._done + 1)

    def update(self, task: int, *, completed: int, now: str = "") -> None:
        """Count as far as this."""
        self._done, self._now = completed, now
        self._show()

    def line(self) -> str:
        """The line as it is now."""
        filled = min(_CELLS, _CELLS * self._done // self._total) if self._total else 0
        cells = "\N{BLACK PARALLELOGRAM}" * filled + "\N{WHITE PARALLELOGRAM}" * (_CELLS - filled)
        minutes, seconds = divmod(int(time.monotonic() - self._begun), 60)
        count = f"{self._done}/{'?' if self._total is None else self._total}"
        return " ".join(
            part for part in (self._text, cells, count, f"{minutes}:{seconds:02}", self._now) if part
        )

    def _show(self) -> None:
        from IPython.display import display  # in a notebook it is there  # pyright: ignore[reportMissingImports]

        data = {"text/plain": self.line()}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


class Frame(NamedTuple):
    """One line of a stack."""

    path: str
    line: int
    function: str


def place(stack: str) -> str:
    """In a few words where a process stands: what it imports, else the innermost frame of the user's code.

    ``stack`` is as ``faulthandler`` writes it, innermost first; "" where there is nothing to be said.
    """
    frames = [
        Frame(found["path"], int(found["line"]), found["function"].strip())
        for found in map(_FRAME.search, stack.splitlines())
        if found
    ]
    imported = _imported(frames)
    if imported:
        return f"importing {imported}"
    own = [frame for frame in frames if not _LIBRARY.search(frame.path) and not _PACKAGES.search(frame.path)]
    chosen = own[0] if own else frames[0] if frames else None
    return f"{chosen.function} at {os.path.basename(chosen.path)}:{chosen.line}" if chosen else ""


def _imported(frames: list[Frame]) -> str:
    """The package that is being imported, seen from outside: the first one whose module is at work."""
    importing = False
    for frame in reversed(frames):
        if "importlib" in frame.path:
            importing = True
        elif importing and frame.function == "<module>":
            package = _PACKAGES.search(frame.path)
            if package:
                return package["name"]
    return ""
