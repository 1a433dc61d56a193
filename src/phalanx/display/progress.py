"""Progress on the terminal: a bar around any iterable.

Nothing is shown outside a terminal, or with ``PHALANX_PROGRESS=0``.
"""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from phalanx.config import settings

if TYPE_CHECKING:
    from rich.console import Console  # only where something is shown

T = TypeVar("T")


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
    # Only where something is shown.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    label = TextColumn("{task.description}", markup=False)
    columns = (label, BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    # Output into a file would be redirected to the terminal while a bar is there.
    with Progress(*columns, console=console, redirect_stdout=sys.stdout.isatty()) as shown:
        task = shown.add_task(text, total=count if count >= 0 else None)
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
