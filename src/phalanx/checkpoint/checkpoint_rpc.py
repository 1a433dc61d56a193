"""What saves and loads ask the ranks of a group, and how what these say reaches whoever saves."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from phalanx.calls.call import Call
from phalanx.calls.future import CallFuture
from phalanx.calls.run_on import run_on
from phalanx.display.progress import progress
from phalanx.errors import CheckpointCorrupted, CheckpointError, DeclarationError, RankReport, RemoteCallError
from phalanx.group.group import Group
from phalanx.weights.sync_sides import Ranks

__all__ = ["Count", "answers_of", "ask_same", "checked_group", "counting", "outputs_of", "send_each"]

Count = Callable[[], object]
"""Counts one more in a bar."""


def checked_group(given: Any, verb: str) -> Ranks:
    """A group, a role of it, or some of its ranks.

    Raises:
        DeclarationError: it is none of these.
    """
    if isinstance(getattr(given, "core", None), Group) and given.ranks:
        return given
    raise DeclarationError(
        f"{verb}: {given!r} is no group; give a group, a role of it such as group.actor, or some of its ranks"
    )


def send_each(group: Ranks, title: str, function: Callable[..., Any], values: Sequence[Any]) -> Call:
    """Have a function of the library run on all ranks of ``group``, each with its own value.

    Raises:
        GroupClosed, GroupBroken: the group takes no calls.
    """
    group.core.ensure_ready()
    return run_on(group.core, function, ranks=group.ranks, each=values, title=title)


def ask_same(group: Ranks, title: str, function: Callable[..., Any], *values: Any) -> list[Any]:
    """The same to all ranks; waits for their answers."""
    group.core.ensure_ready()
    return answers_of(group, run_on(group.core, function, *values, ranks=group.ranks, title=title))


def answers_of(group: Ranks, call: Call) -> list[Any]:
    """What the ranks answered; what they say of the save or load is raised as they said it."""
    with _plainly(group):
        return call.result(None)


def outputs_of(group: Ranks, call: Call, description: str, count: Count | None = None) -> list[Any]:
    """The outputs by rank; each is counted, in a bar of this call's own where none is given."""
    future: CallFuture[list[Any]] = CallFuture(call)
    with _plainly(group):
        if count is None:
            for _ in progress(future.stream(), description=description):
                pass
        else:
            for _ in future.stream():
                count()
        return future.result()


@contextmanager
def counting(total: int, description: str) -> Generator[Count]:
    """One bar for what several groups do; what is given counts one more of ``total``."""
    steps = progress(range(total), total=total, description=description)
    next(steps, None)
    try:
        yield lambda: next(steps, None)
    finally:
        steps.close()  # type: ignore[attr-defined]  # a generator


@contextmanager
def _plainly(group: Ranks) -> Generator[None]:
    """Raise what ranks say of a save or a load as the sentence that it is.

    The way to where it was said is the library's own. What users' code raised keeps its traceback.
    """
    try:
        yield
    except RemoteCallError as error:
        told = [report for report in error.causes if isinstance(report.exception, CheckpointError)]
        if not told or len(told) < len(error.causes):
            raise
        raise _plain(group, told) from None


def _plain(group: Ranks, told: Sequence[RankReport]) -> CheckpointError:
    first = told[0].exception
    text = str(first)
    ranks = sorted(report.rank for report in told if str(report.exception) == text)
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {group.core.name!r}"
    if isinstance(first, CheckpointCorrupted):
        return CheckpointCorrupted(f"{who}: {text}", files=first.files)
    return (type(first) if isinstance(first, CheckpointError) else CheckpointError)(f"{who}: {text}")
