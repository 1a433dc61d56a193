"""What reaches a rank beside its calls: requests for its stacks, and the end of a call that was cancelled.

A busy process answers nothing, so everything here works while its main thread is elsewhere: a daemon thread waits on a
pipe for what is to be interrupted, and for requests for the stacks, which it writes; where it cannot, since native
code holds the interpreter, a thread that gets a signal writes its own, by ``faulthandler`` in C; and the page is plain
shared memory. All are file descriptors without a name, which the node's agent opens through ``/proc/<pid>/fd``:
nothing is left behind by a process that is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import fcntl
import os
import secrets
import select
import signal
import socket
import threading
from collections.abc import Generator
from types import FrameType, TracebackType

from phalanx.wire.call_page import INTERRUPT, SEVER, STACKS, CallPage, answer, available
from phalanx.wire.messages import SideChannel
from phalanx.worker.thread_stacks import stacks

#: Variable by which all processes that a rank starts can be told, whatever their parent and session are now.
MARK_VARIABLE = "PHALANX_PROCESS"
STACKS_SIGNAL = signal.SIGUSR2
INTERRUPT_SIGNAL = signal.SIGUSR1
_AGAIN_S = 0.05
_TRIES = 100


class Interrupted(BaseException):
    """Raised in the middle of a call that was cancelled. No ``Exception``, so that retry loops let it pass."""


class Control:
    """The side channel of one worker process."""

    def __init__(self) -> None:
        #: Where calls without a message are noted directly.
        self.page = CallPage()
        self._stacks = os.memfd_create("phalanx-stacks")
        fcntl.fcntl(self._stacks, fcntl.F_SETFL, os.O_APPEND)  # so that the reader may truncate it
        # Only of the thread that gets the signal, which stands still in its handler; the others would run on.
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=False, chain=False)
        self._requests, self._wake = os.pipe()
        #: Number of the call that runs on the main thread; 0 between calls.
        self.running = 0
        self._tasks: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Task[object]]] = {}
        self._mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        os.environ[MARK_VARIABLE] = self._mark
        #: Sockets of process groups, and those that were there before the one that is being made now.
        self._collectives = set[str]()
        self._before: frozenset[str] | None = None
        self._served = set[int]()
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            signal.signal(INTERRUPT_SIGNAL, self._on_interrupt)
        threading.Thread(target=self._serve, name="phalanx-control", daemon=True).start()

    def describe(self) -> SideChannel:
        """What the node's agent needs to find all this."""
        return SideChannel(_started(), self.page.fd, self._stacks, self._wake, self._mark)

    @contextlib.contextmanager
    def call(self, number: int, method: str = "") -> Generator[None]:
        """The time of one call of a method on the thread that runs it.

        Raises:
            Interrupted: the call was cancelled, before it began or while it ran.
        """
        slot = self.page.begin(number, method)
        try:
            self.running = number  # before the question: a cancellation meanwhile finds one or the other
            if self.page.cancelled(number):
                raise Interrupted("cancelled before it began")
            yield
        finally:
            self.running = 0
            self.page.end(slot)

    @contextlib.contextmanager
    def task(self, number: int, method: str = "") -> Generator[None]:
        """The time of one call as a task of the running loop; it is cancelled as any task is."""
        slot = self.page.begin(number, method)
        try:
            if self.page.cancelled(number):
                raise Interrupted("cancelled before it began")
            task = asyncio.current_task()
            if task is not None:
                self._tasks[number] = (asyncio.get_running_loop(), task)
            yield
        except asyncio.CancelledError:
            if self.page.cancelled(number):
                raise Interrupted("interrupted while it ran") from None
            raise
        finally:
            self._tasks.pop(number, None)
            self.page.end(slot)

    @contextlib.contextmanager
    def stream(self, number: int, method: str = "") -> Generator[StreamSteps]:
        """The time of one call of a method that yields: while it is at an item it can be interrupted, and only then.

        Raises:
            Interrupted: from a step, or when one begins; the call was cancelled.
        """
        slot = self.page.begin(number, method)
        try:
            yield StreamSteps(self, number)
        finally:
            self.page.end(slot)

    @contextlib.contextmanager
    def task_stream(self, number: int, method: str = "") -> Generator[TaskSteps]:
        """The same for one whose steps are taken by a task of the running loop."""
        slot = self.page.begin(number, method)
        try:
            yield TaskSteps(self, number)
        finally:
            self.page.end(slot)

    def enter_step(self, number: int) -> None:
        """Begin to make an item on the main thread."""
        self.running = number
        if self.page.cancelled(number):
            self.running = 0
            raise Interrupted("interrupted between two items")

    def enter_task_step(self, number: int) -> None:
        """Begin to make an item in the current task."""
        if self.page.cancelled(number):
            raise Interrupted("interrupted between two items")
        task = asyncio.current_task()
        if task is not None:
            self._tasks[number] = (asyncio.get_running_loop(), task)

    def leave_task_step(self, number: int) -> None:
        """That item is made; the task may be at something else."""
        self._tasks.pop(number, None)

    @contextlib.contextmanager
    def making_group(self) -> Generator[None]:
        """The time in which connections of a process group are made: only sockets that come meanwhile are ever cut."""
        outermost = self._before is None
        if outermost:
            self._before = frozenset(_sockets().values())
        try:
            yield
        finally:
            if outermost:
                self._collectives |= set(_sockets().values()) - (self._before or frozenset())
                self._before = None

    def forget_groups(self) -> None:
        """The process groups that there were are not used any more."""
        self._collectives.clear()

    def keep_port(self, port: int) -> None:
        """Never cut what others have connected to this port: the rendezvous store, which they go on to need."""
        self._served.add(port)

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        number = self.running
        if number and self.page.cancelled(number):
            self.running = 0  # once per call: clean-up code runs undisturbed
            raise Interrupted("interrupted while it ran")

    def _serve(self) -> None:
        tries = 0
        while True:
            if tries and not select.select([self._requests], [], [], _AGAIN_S)[0]:
                tries = tries - 1 if self._signal() else 0
                continue
            # Each once, however often it was asked for while this thread could not run.
            for request in dict.fromkeys(os.read(self._requests, 4096)):
                if request == INTERRUPT[0]:
                    self._interrupt()
                    tries = _TRIES
                elif request == SEVER[0]:
                    self._sever()
                elif request == STACKS[0]:
                    self._write_stacks()

    def _write_stacks(self) -> None:
        with contextlib.suppress(
            Exception
        ):  # no answer is one: the signal is next, and this thread has more to do
            os.write(self._stacks, answer(stacks()))

    def _interrupt(self) -> None:
        for number, (loop, _) in list(self._tasks.items()):
            if self.page.cancelled(number):
                with contextlib.suppress(RuntimeError):  # its loop was closed
                    loop.call_soon_threadsafe(self._cancel_task, number)
        self._signal()

    def _signal(self) -> bool:
        """Interrupt the main thread if it is at a call that was cancelled; whether it is.

        A signal between the interpreter's last look for one and the system call in which the thread then waits wakes
        nobody, and the thread that sends it runs in just that moment, since the other lets go of the interpreter there.
        So it is sent again until it was heard; code that hears of none while it runs is not waited for.
        """
        main = threading.main_thread().ident
        at_it = self._main and main is not None and self.page.cancelled(self.running)
        if at_it and main is not None:
            signal.pthread_kill(main, INTERRUPT_SIGNAL)
        return at_it

    def _cancel_task(self, number: int) -> None:
        """End the task if it is still at that call; it may have gone on to something else meanwhile."""
        if number in self._tasks:
            self._tasks[number][1].cancel()

    def _sever(self) -> None:
        """Cut the connections of the process groups, so that a thread in a collective gets an error.

        gloo frees nobody on abort; its sockets do. A listener has no peer and must be left alone: gloo ends the
        process when it is shut down. Nothing else is cut: a rank that stays in its group needs Ray's connections, and
        others need the store that it may serve.
        """
        before = self._before
        for fd, name in _sockets().items():
            if name not in self._collectives and (before is None or name in before):
                continue
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
                if (
                    one.family in (socket.AF_INET, socket.AF_INET6)
                    and one.getsockname()[1] not in self._served
                ):
                    one.getpeername()
                    one.shutdown(socket.SHUT_RDWR)


class StreamSteps:
    """The steps of one call that yields, on the main thread: a context manager, entered anew for each item."""

    def __init__(self, control: Control, number: int) -> None:
        self._control = control
        self._number = number

    def __enter__(self) -> None:
        self._control.enter_step(self._number)

    def __exit__(self, *error: object) -> None:
        self._control.running = 0


class TaskSteps:
    """The same in a task of a loop."""

    def __init__(self, control: Control, number: int) -> None:
        self._control = control
        self._number = number

    def __enter__(self) -> None:
        self._control.enter_task_step(self._number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._control.leave_task_step(self._number)
        if isinstance(error, asyncio.CancelledError) and self._control.page.cancelled(self._number):
            raise Interrupted("interrupted while it ran") from None


def _started() -> int:
    """When this process was started, in clock ticks since boot: with the pid, its identity (proc(5), field 22)."""
    with open("/proc/self/stat", "rb") as stat:
        return int(stat.read().rpartition(b")")[2].split()[19])


def _sockets() -> dict[int, str]:
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[int(name)] = target
    return found


_made: list[Control] = []


def control() -> Control | None:
    """The side channel of this process, made when first asked for; None where the platform has none."""
    if not _made and available():
        _made.append(Control())
    return _made[0] if _made else None
