"""Cleanup at the end of a rank, registered by the library while it creates things that must not outlive the rank.

The hooks run after the users' own ``close()``, also if that raised, and at an orderly exit of a process that was not
closed. A killed process runs no hooks, so a resource that must not outlive its rank has no name (anonymous memory,
abstract sockets) and ends with the process.
"""

from __future__ import annotations

import atexit
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from phalanx.declare.context import current_context

#: Key of a rank's hooks in ``WorkerContext.shared``.
CLOSERS = "closers"


class ExitHooks:
    """The exit hooks of a rank: each runs once, in reverse order of registration."""

    def __init__(self, *, own_process: bool) -> None:
        self._own_process = own_process
        self._hooks: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        #: True if the rank leaves its group: it rejects calls of views, and in the end hands over its channel items.
        self.leaves = False
        #: Called before the result of a call is sent; the result waits for the futures that they return, if any.
        self.before_result: list[Callable[[], Future[Any] | None]] = []
        #: Called with the reason when a rank in the driver's process has ended, in order of registration.
        self.if_lost: list[Callable[[str], object]] = []

    def add(self, callback: Callable[..., object], *args: Any) -> None:
        """Run ``callback(*args)`` at the end of the rank."""
        if self._own_process:
            atexit.unregister(self.run)
            atexit.register(self.run)
        self._hooks.append((callback, args))

    def run(self) -> list[BaseException]:
        """Run the registered hooks, and hooks that these register. Print their errors, and return them."""
        errors: list[BaseException] = []
        while self._hooks:
            callback, args = self._hooks.pop()
            try:
                callback(*args)
            except BaseException as error:
                errors.append(error)
                with suppress(Exception):  # stderr may be closed
                    report(f"closer {getattr(callback, '__qualname__', callback)}", error)
        return errors


def current_closers() -> ExitHooks | None:
    """Return the exit hooks of the rank that runs this code, None outside of ranks."""
    context = current_context()
    return None if context is None else context.shared.get(CLOSERS)


def report(title: str, error: BaseException) -> None:
    """Print an error at the end of a rank into its log."""
    sys.stderr.write(f"phalanx: {title} raised {type(error).__name__}:\n")
    traceback.print_exception(error)
