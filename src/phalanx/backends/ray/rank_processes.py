"""Processes of ranks, observed through ``/proc`` by another process of their node: calls and stacks.

A control thread of each rank writes the stacks of all threads. It needs only the GIL, which blocking calls release. If
it does not respond because native code holds the GIL, a signal makes the thread that runs the rank's calls write its
own stack. The signal handler does not read the stacks of other threads: they keep running, and reading a frame that
just returned (freed memory) has crashed ranks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import IO, NamedTuple

from phalanx.backends.ray import reaper
from phalanx.wire import call_page
from phalanx.wire.messages import SideChannel

STOPPED = "the process is stopped, as by SIGSTOP: its stack cannot be read; SIGCONT continues it"
GONE = "its process has ended"
_SIGNAL = signal.SIGUSR2
_NOT_CAUGHT = "its interpreter does not answer, and SIGUSR2 is not caught there: its stack cannot be read"
_THREAD_WITHIN_S, _SIGNAL_WITHIN_S = 0.3, 0.25
_LOOK_EVERY_S = 0.005
_ALONE = "Stack (most recent call first):"  # first line of faulthandler's text for a single thread
_RUNS_CALLS = "/phalanx/worker/worker_runtime.py"


def stacks_of(targets: Sequence[ProcessHandle]) -> list[tuple[str, str]]:
    """Return a pair for each rank: its stack and "", or "" and the reason. Reads all ranks in parallel."""
    runs, found = dict(enumerate(map(_stack_of, targets))), dict[int, tuple[str, str]]()
    while len(found) < len(runs):
        for index in runs.keys() - found.keys():
            try:
                next(runs[index])
            except StopIteration as end:
                found[index] = end.value
        time.sleep(_LOOK_EVERY_S)
    return [found[index] for index in runs]


def _stack_of(target: ProcessHandle) -> Generator[None, None, tuple[str, str]]:
    """Return the stack of a rank and "", or "" and the reason. Yields while it waits."""
    process = target.same()
    if process is None or process.stopped:
        return "", STOPPED if process else GONE
    try:
        # The control thread of the rank writes all stacks, which needs the GIL.
        ask = partial(target.request, call_page.STACKS)
        written = yield from _answer(target, ask, _THREAD_WITHIN_S)
        if written is None:
            if not target.signals("SigCgt") >> (_SIGNAL - 1) & 1:  # the signal would end the process
                return "", _NOT_CAUGHT if target.same() else GONE
            # The thread that runs calls writes its own stack, which does not need the GIL.
            ask = partial(_send, target.pid, call_page.read(target.page()).thread, _SIGNAL)
            written = yield from _answer(target, ask, _SIGNAL_WITHIN_S, signaled=True)
    except OSError as error:
        return "", f"its stack cannot be read: {error}" if target.same() else GONE
    text = readable_stack((written or b"").decode(errors="replace"))
    return text, "" if text else "it answered neither its own thread nor a signal that asked for its stack"


def _answer(
    target: ProcessHandle, ask: Callable[[], None], seconds: float, *, signaled: bool = False
) -> Generator[None, None, bytes | None]:
    """Return the response of a rank to ``ask``, or None if it is not complete in time. Yields while it waits.

    A response to a signal has no end mark: it is complete if two reads in a row are equal.
    """
    with target.open(target.side.stacks, "r+b") as file:
        file.truncate(0)
        ask()
        limit, before = time.monotonic() + seconds, b""
        while True:
            file.seek(0)
            written = file.read()
            whole = written if signaled and written == before and written else call_page.answered(written)
            if whole is not None or time.monotonic() > limit:
                return whole
            before = written
            yield


def readable_stack(dump: str) -> str:
    """Return the relevant part of a ``faulthandler`` dump.

    This is the stack of the thread that runs the call, without this library's outermost frames, and the number of other
    threads.
    """
    if _ALONE in dump:
        note = "(native code holds the interpreter: only this thread could be read)"
        return "\n".join([*_shown(dump.rpartition(_ALONE)[2]), note])
    threads = [
        block for block in dump.replace("Current thread ", "Thread ").split("Thread ") if block.strip()
    ]
    if not threads:
        return ""
    # The thread that runs the call; between calls the main thread, which comes last.
    chosen = next((block for block in threads if _RUNS_CALLS in block), threads[-1])
    more = f"({len(threads) - 1} more threads)" if len(threads) > 1 else ""
    return "\n".join([*_shown(chosen.partition("\n")[2]), more]).rstrip()


def _shown(frames: str) -> list[str]:
    lines = [line.strip() for line in frames.strip().splitlines()]
    own = next((i for i, line in enumerate(lines) if "/phalanx/worker/" in line), len(lines))
    return lines[:own] or lines


def _send(pid: int, thread: int, signum: int) -> None:
    """Send a signal to a thread of a process; to the process, if the thread is unknown (0) or its first.

    Raises:
        OSError: if the thread or the process has ended.
    """
    to_thread = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)
    if thread in (0, pid) or to_thread is None:
        os.kill(pid, signum)
    elif to_thread(pid, thread, signum) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


#: The side channel of no process.
NO_SIDE = SideChannel(0, -1, -1, -1, "")


class ProcessHandle(NamedTuple):
    """Handle of a rank's process, for the agent of its node.

    ``node`` is the id of the node, "" for the node of the calling process. ``call`` is the id of the call to cancel.
    """

    pid: int
    side: SideChannel = NO_SIDE
    log_paths: tuple[str, ...] = ()
    node: str = ""
    call: int = 0

    def same(self) -> reaper.Process | None:
        """Return the process, or None if it has ended (even if its pid is in use again)."""
        return reaper.running(self.pid, self.side.started)

    def signals(self, mask: str) -> int:
        """Return a signal mask of the process, such as ``SigCgt``, from /proc/<pid>/status (proc(5)); 0: unreadable."""
        status = reaper.read_proc(self.pid, "status").decode(errors="replace").splitlines()
        return next((int(line.split()[1], 16) for line in status if line.startswith(f"{mask}:")), 0)

    def dies(self) -> bool:
        """Return whether the process was killed but has not ended yet, which takes a while if it has much memory.

        Until then SIGKILL is among the pending signals of the process.
        """
        return bool(self.signals("ShdPnd") >> (signal.SIGKILL - 1) & 1)

    def open(self, fd: int, mode: str) -> IO[bytes]:
        """Open the file behind a file descriptor of the process, unbuffered."""
        return open(f"/proc/{self.pid}/fd/{fd}", mode, buffering=0)

    def page(self) -> bytes:
        """Return the bytes of the process's call page.

        Raises:
            OSError: if the process has ended.
        """
        with self.open(self.side.page, "rb") as file:
            return file.read(call_page.SIZE)

    def request(self, request: bytes) -> None:
        """Send a request to the control thread of the process, without waiting.

        Raises:
            OSError: if the process has ended, or its queue of requests is full.
        """
        fd = os.open(f"/proc/{self.pid}/fd/{self.side.control}", os.O_WRONLY | os.O_NONBLOCK)
        with open(fd, "wb", buffering=0) as pipe:
            pipe.write(request)
