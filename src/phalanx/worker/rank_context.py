"""When a thread is at a rank: what is current then, and by which way calls run."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import get_native_id

from phalanx.declare.context import WorkerContext, present
from phalanx.worker.async_runner import Loop, Way, awaited
from phalanx.worker.control import Control
from phalanx.worker.exit_hooks import Closers
from phalanx.worker.worker_streams import Anew

NOWHERE: AbstractContextManager[None] = nullcontext()


class Presence:
    """Of one rank, which may share its process with others: then its closers and its context are the current ones.

    In a process of its own, whose side channel is ``control``, a call can be interrupted.
    """

    def __init__(self, closers: Closers, loop: Loop, *, in_driver: bool) -> None:
        self._closers = closers
        self.context = WorkerContext()
        self.control: Control | None = None
        # Ctrl-C reaches the ranks that live in the driver's process; in another one it is what a method raised.
        ends = (SystemExit, KeyboardInterrupt) if in_driver else (SystemExit,)
        #: How calls run on the calling thread, and how on a loop.
        self.here = Way(self._during, loop.to_end_at_once, ends, self._steps)
        self.on_loop = Way(self._during_task, awaited, (SystemExit, GeneratorExit), self._task_steps)

    @contextmanager
    def now(self) -> Generator[None]:
        """The time in which this thread is at this rank, of those that share the process."""
        with ExitStack() as stack:
            stack.enter_context(self._closers.current())
            stack.enter_context(present(self.context))
            yield

    def runs_here(self) -> None:
        """Say that constructors and methods run on this thread, for those who ask where it stands."""
        if self.control is not None:
            self.control.page.runs_on(get_native_id())

    def _during(self, call: int, method: str) -> AbstractContextManager[None]:
        return self.now() if self.control is None else self.control.call(call, method)

    def _during_task(self, call: int, method: str) -> AbstractContextManager[None]:
        return NOWHERE if self.control is None else self.control.task(call, method)

    def _steps(self, call: int, method: str) -> AbstractContextManager[AbstractContextManager[None]]:
        if self.control is None:
            return nullcontext(Anew(self._closers.current))
        return self.control.stream(call, method)

    def _task_steps(self, call: int, method: str) -> AbstractContextManager[AbstractContextManager[None]]:
        return nullcontext(NOWHERE) if self.control is None else self.control.task_stream(call, method)
