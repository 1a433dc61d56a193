"""Access to a busy rank from outside: interrupts of cancelled calls, stacks of threads, and the call page.

All of this works while the main thread is busy. A daemon thread reads requests from a pipe: it interrupts calls, aborts
collectives and writes stacks. If native code holds the interpreter, a signal handler in C (``faulthandler``) writes the
main thread's stack. The page is plain shared memory. All are file descriptors without a name, which the node's agent
opens through ``/proc/<pid>/fd``: a killed process leaves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import fcntl
import functools
import gc
import os
import secrets
import select
import signal
import sys
import threading
from collections.abc import Generator
from traceback import walk_stack
from types import FrameType

from phalanx.wire.call_page import INTERRUPT, SEVER, STACKS, CallPage, Listed, answer
from phalanx.wire.messages import SideChannel
from phalanx.worker.rendezvous import collectives

#: Environment variable that marks all processes that a rank starts, whatever their parent and session become.
MARK_VARIABLE = "PHALANX_PROCESS"
STACKS_SIGNAL = signal.SIGUSR2
INTERRUPT_SIGNAL = signal.SIGUSR1
_AGAIN_S = 0.05
_TRIES = 100


class Interrupted(BaseException):
    """Raised in a call that was cancelled. Not an ``Exception``, so that retry loops let it pass."""


class Control:
    """The side channel of a worker process."""

    def __init__(self) -> None:
        self.page = CallPage()
        self._stacks = os.memfd_create("phalanx-stacks")
        fcntl.fcntl(self._stacks, fcntl.F_SETFL, os.O_APPEND)  # so that the reader may truncate it
        # Only the thread that gets the signal, since it stops in the handler; other threads would continue to run.
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=False, chain=False)
        self._requests, self._wake = os.pipe()
        #: Number of the call that runs on the main thread; 0 between calls.
        self.running = 0
        self._tasks: dict[int, asyncio.Task[object]] = {}
        self._mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        os.environ[MARK_VARIABLE] = self._mark
        #: The main thread, if calls run there; None: on an event loop's thread, where tasks are cancelled.
        self._main = threading.get_ident() if threading.current_thread() is threading.main_thread() else None
        if self._main is not None:
            signal.signal(INTERRUPT_SIGNAL, self._on_interrupt)
        #: ``listed(number, method)``: a block in which the page shows a call as running.
        self.listed = functools.partial(Listed, self.page)
        #: ``step(number)``: a block on the main thread that raises Interrupted if its call was, or is, cancelled.
        self.step = functools.partial(_Step, self)
        threading.Thread(target=self._serve, name="phalanx-control", daemon=True).start()

    def describe(self) -> SideChannel:
        """Return the file descriptors and the identity of this process, for the node's agent."""
        with open("/proc/self/stat", "rb") as stat:  # proc(5), field 22: its start in clock ticks since boot
            started = int(stat.read().rpartition(b")")[2].split()[19])
        return SideChannel(started, self.page.fd, self._stacks, self._wake, self._mark)

    @contextlib.contextmanager
    def task_step(self, number: int) -> Generator[None]:
        """Let a call, or an item of it, be interrupted by cancelling the current task.

        Raises:
            Interrupted: if the call was cancelled before the block, or is cancelled in it.
        """
        if (task := asyncio.current_task()) is not None:
            self._tasks[number] = task
        try:
            self.check(number)  # not before: a cancellation in between would find no task
            yield
        except asyncio.CancelledError:
            if self.page.cancelled(number):
                raise Interrupted("interrupted while it ran") from None
            raise
        finally:
            self._tasks.pop(number, None)

    def check(self, number: int) -> None:
        """Raise Interrupted if a call was cancelled."""
        if self.page.cancelled(number):
            self.running = 0
            raise Interrupted("cancelled before it began, or between two items")

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self.page.cancelled(self.running):
            self.running = 0  # once per call: cleanup code runs undisturbed
            raise Interrupted("interrupted while it ran")

    def _serve(self) -> None:
        tries = 0
        while True:
            if tries and not select.select([self._requests], [], [], _AGAIN_S)[0]:
                tries = tries - 1 if self._signal() else 0
                continue
            # Each once, however often it was requested while this thread could not run.
            for request in dict.fromkeys(os.read(self._requests, 4096)):
                if request == INTERRUPT[0]:
                    self._interrupt()
                    tries = _TRIES
                elif request == SEVER[0]:
                    collectives.abort()
                elif request == STACKS[0]:
                    with contextlib.suppress(Exception):  # the reader sends the signal next
                        os.write(self._stacks, answer(stacks()))

    def _interrupt(self) -> None:
        for number, task in list(self._tasks.items()):
            if self.page.cancelled(number):
                with contextlib.suppress(RuntimeError):  # its loop was closed
                    task.get_loop().call_soon_threadsafe(self._cancel_task, number)
        self._signal()

    def _signal(self) -> bool:
        """Interrupt the main thread if its call was cancelled. Return whether it was.

        A signal has no effect if it arrives after the interpreter's last check for signals and before the system call
        in which the main thread waits. The sending thread often runs just then, since the main thread releases the
        interpreter there. So the signal is repeated until the call ends, up to 5 s.
        """
        if self._main is None or not self.page.cancelled(self.running):
            return False
        signal.pthread_kill(self._main, INTERRUPT_SIGNAL)
        return True

    def _cancel_task(self, number: int) -> None:
        # Once per call: cleanup code runs undisturbed. The task may have left the call by now.
        if (task := self._tasks.pop(number, None)) is not None:
            task.cancel()


class _Step:
    """A block on the main thread that a cancellation of its call interrupts. A generator would take longer."""

    __slots__ = ("_control", "_number")

    def __init__(self, control: Control, number: int) -> None:
        self._control, self._number = control, number

    def __enter__(self) -> None:
        self._control.running = self._number  # before the check, so that no cancellation in between is missed
        self._control.check(self._number)

    def __exit__(self, *_: object) -> None:
        self._control.running = 0


_FRAMES, _THREADS = 100, 100  # per thread, and threads, as in faulthandler


def stacks() -> str:
    """Return the stacks of all threads as ``faulthandler`` writes them: innermost frame first, the main thread last.

    ``faulthandler`` itself needs no interpreter for that, but the threads run on, and a frame that just returns is
    freed memory, which sometimes crashes the process. This thread holds the interpreter, so frames cannot change.

    Garbage collection is disabled during this. Python 3.11 makes frames into objects under a lock that each new thread
    needs: a collection there runs finalizers, which may wait for such a thread forever
    (https://github.com/python/cpython/issues/106883).
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        frames = sys._current_frames()
        main = threading.main_thread().ident
        others = [ident for ident in frames if ident != main][: _THREADS - 1]
        shown = [ident for ident in (*others, main) if ident in frames]
        return "\n".join(line for ident in shown for line in _stack(ident, frames[ident]))
    finally:
        if collecting:
            gc.enable()


def _stack(ident: int, frame: FrameType) -> Generator[str]:
    yield f"Thread 0x{ident:016x} (most recent call first):"
    for number, (one, line) in enumerate(walk_stack(frame)):
        if number == _FRAMES:
            yield "  ..."
            break
        yield f'  File "{one.f_code.co_filename}", line {line or "?"} in {one.f_code.co_name}'
    yield ""
