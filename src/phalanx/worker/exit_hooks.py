"""What a rank does at its end: closers that the library registers while it makes things that must not stay.

They run after the users' own ``close()``, also where that raised; where the process exits without one, but in good
order, they run then. A process that is killed runs nothing: what must not outlive its rank then has no name (anonymous
memory, abstract sockets), so that it ends with the process.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import Any

from phalanx.errors import InternalError


class Closers:
    """The closers of one rank: each runs once, the one that was registered last first."""

    def __init__(self, *, own_process: bool) -> None:
        self._own_process = own_process
        self._lock = threading.Lock()
        self._waiting: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        #: Whether others go on without this rank: what it holds for them is handed over, however long that takes.
        self.hands_over = False
        #: The rank in words, once it is one: "rank 2 of group 'actor'".
        self.place = ""
        #: Called with the reason if the rank ends without having run its closers.
        self.if_lost: list[Callable[[str], object]] = []
        if own_process:
            _of_process[:] = [self]

    def add(self, callback: Callable[..., object], *args: Any) -> None:
        """Have ``callback(*args)`` run at the end of the rank."""
        with self._lock:
            if self._own_process and not self._waiting:
                atexit.unregister(self.run)
                atexit.register(self.run)
            self._waiting.append((callback, args))

    def run(self) -> list[BaseException]:
        """Run what is waiting; what some of them raised, which is printed as well."""
        errors: list[BaseException] = []
        while True:
            with self._lock:
                if not self._waiting:
                    return errors
                callback, args = self._waiting.pop()
            try:
                callback(*args)
            except BaseException as error:
                report(f"closer {getattr(callback, '__qualname__', callback)}", error)
                errors.append(error)

    @contextlib.contextmanager
    def current(self) -> Generator[None]:
        """The time in which :func:`at_close` of this thread means this rank, where several share a process."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_of_process: list[Closers] = []
_current: ContextVar[Closers | None] = ContextVar("phalanx_closers", default=None)


def current_closers() -> Closers | None:
    """Those of the rank whose code this is; None where there is no rank."""
    return _current.get() or next(iter(_of_process), None)


def at_close(callback: Callable[..., object], *args: Any) -> None:
    """Have ``callback(*args)`` run at the end of the rank whose code this is, once, before what was registered earlier.

    Raises:
        InternalError: this is no rank.
    """
    closers = current_closers()
    if closers is None:
        raise InternalError(
            "at_close() was called where there is no rank; call it from a method of a worker, or from a function "
            "that runs on the ranks"
        )
    closers.add(callback, *args)


def report(what: str, error: BaseException) -> None:
    """Print what went wrong at the end of a rank, into its log."""
    sys.stderr.write(f"phalanx: {what} raised {type(error).__name__}:\n")
    traceback.print_exception(error)
