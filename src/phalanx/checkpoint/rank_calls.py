"""Calls of handlers on the ranks of a group, their errors, and a progress bar over several groups."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from phalanx.calls.call import Call
from phalanx.calls.future import CallFuture
from phalanx.calls.run_on import run_on
from phalanx.display.progress import progress
from phalanx.errors import CheckpointCorrupted, CheckpointError, DeclarationError, RemoteCallError
from phalanx.group.group import Group
from phalanx.members.recovery import ensure_ready
from phalanx.weights.sync_pairs import Ranks

Count = Callable[[], object]
"""Advances a progress bar by a rank."""


def checked_group(value: Any, verb: str) -> Ranks:
    """Return a group, a role of it, or some of its ranks.

    Raises:
        DeclarationError: if it is none of these.
    """
    if isinstance(getattr(value, "core", None), Group) and value.ranks:
        return value
    raise DeclarationError(
        f"{verb}: {value!r} is no group; give a group, a role of it such as group.actor, or some of its ranks"
    )


def send(group: Ranks, title: str, handler: Callable[..., Any], each: Sequence[Any], *args: Any) -> Call:
    """Send ``handler(host, value, *args)`` to all ranks, each with its own value."""
    ensure_ready(group.core)
    return run_on(group.core, handler, *args, ranks=group.ranks, each=each, title=title)


def results(group: Ranks, call: Call, title: str, count: Count | None = None) -> list[Any]:
    """Return the results by rank, counted in a progress bar.

    Errors that ranks raise about the save or load are raised without the library's traceback. Errors of user code
    keep theirs.
    """
    future: CallFuture[list[Any]] = CallFuture(call)
    try:
        for _ in progress(future.stream(), description=title) if count is None else future.stream():
            if count is not None:
                count()
        return future.result()
    except RemoteCallError as error:
        exceptions = [report.exception for report in error.causes]
        first = exceptions[0] if exceptions else None
        if not isinstance(first, CheckpointError) or not all(
            isinstance(one, CheckpointError) for one in exceptions
        ):
            raise
        ranks = sorted(report.rank for report in error.causes if str(report.exception) == str(first))
        owner = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {group.core.name!r}"
        if isinstance(first, CheckpointCorrupted):
            raise CheckpointCorrupted(f"{owner}: {first}", files=first.files) from None
        raise type(first)(f"{owner}: {first}") from None


@contextmanager
def counting(total: int, description: str) -> Generator[Count]:
    """Show a single progress bar for the ranks of several groups."""
    steps = progress(range(total), total=total, description=description)
    next(steps, None)
    try:
        yield lambda: next(steps, None)
    finally:
        steps.close()  # type: ignore[attr-defined]  # a generator
