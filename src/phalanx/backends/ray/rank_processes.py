"""Processes of ranks, observed through ``/proc`` by another process of their node: calls, stacks, memory.

A thread of each rank writes the stacks of all its threads. It waits only for the interpreter, which blocking calls
release. If it does not respond because native code holds the interpreter, a signal makes the thread that runs the
rank's calls write its own stack. The signal does not read other threads: they run on, and a frame that just returns
is freed memory, which has crashed ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import IO, NamedTuple

from phalanx.backends.ray import reaper
from phalanx.wire import call_page
from phalanx.wire.messages import SideChannel

STOPPED = "the process is stopped, as by SIGSTOP: its stack cannot be read; SIGCONT lets it go on"
_SIGNAL = signal.SIGUSR2
_THREAD_WITHIN_S, _SIGNAL_WITHIN_S = 0.3, 0.25
_LOOK_EVERY_S = 0.005
_ALONE = "Stack (most recent call first):"  # begin of faulthandler's text for a single thread
_RUNS_CALLS = "/phalanx/worker/worker_runtime.py"


def stacks_of(targets: Sequence[ProcessHandle]) -> list[tuple[str, str]]:
    """Return the stack of each rank, or "" and the reason. All ranks are asked in parallel."""
    asked = [_Asked(target) for target in targets]
    for one in asked:
        one.ask_its_thread()
    _wait(asked, _THREAD_WITHIN_S)
    late = [one for one in asked if not one.done]
    for one in late:
        one.signal()
    _wait(late, _SIGNAL_WITHIN_S)
    return [one.told() for one in asked]


def _wait(asked: Sequence[_Asked], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while True:
        over = [one.look() for one in asked]
        if all(over) or time.monotonic() > limit:
            return
        time.sleep(_LOOK_EVERY_S)


class _Asked:
    """A request for the stacks of a rank."""

    def __init__(self, target: ProcessHandle) -> None:
        self._target = target
        self._text = b""
        self._why = ""
        self._signalled = False
        self.done = False

    def ask_its_thread(self) -> None:
        """Let a thread of the rank write all stacks, which needs the interpreter."""
        process = self._target.same()
        if process is None:
            self._give_up("its process is gone")
        elif process.stopped:
            self._give_up(STOPPED)
        else:
            try:
                self._empty()
                self._target.request(call_page.STACKS)
            except OSError as error:
                self._give_up(f"its stack cannot be read: {error}")

    def signal(self) -> None:
        """Let the thread that runs calls write its own stack, which does not need the interpreter."""
        if self._target.same() is None:
            self._give_up("its process is gone")
        elif not _catches(self._target.pid, _SIGNAL):  # else the signal would end it
            self._give_up(
                "its interpreter does not answer, and SIGUSR2 is not caught there (any more): its stack cannot be read"
            )
        else:
            try:
                self._empty()
                _send(self._target.pid, call_page.read(self._target.page()).thread, _SIGNAL)
                self._signalled = True
            except OSError as error:
                self._give_up(f"its stack cannot be read: {error}")

    def look(self) -> bool:
        """Read the response of the rank. Return whether it is complete or will not come."""
        if not self.done:
            try:
                written = self._written()
            except OSError:
                self._give_up("its process is gone")
                return True
            # A response to a signal has no end mark: it is complete when nothing has been added for a moment.
            whole = call_page.answered(written)
            self.done = whole is not None or (self._signalled and written != b"" and written == self._text)
            self._text = written if whole is None else whole
        return self.done

    def told(self) -> tuple[str, str]:
        """Return the stack of the rank, or "" and the reason."""
        text = readable_stack(self._text.decode(errors="replace"))
        return (
            text,
            ""
            if text
            else self._why or "it answered neither its own thread nor a signal that asked for its stack",
        )

    def _give_up(self, why: str) -> None:
        self._why, self.done = why, True

    def _empty(self) -> None:
        with self._stacks("r+b") as file:
            file.truncate(0)

    def _written(self) -> bytes:
        with self._stacks("rb") as file:
            return file.read()

    def _stacks(self, mode: str) -> IO[bytes]:
        side = self._target.side
        return self._target.open(-1 if side is None else side.stacks, mode)


def readable_stack(dump: str) -> str:
    """Return the readable part of a ``faulthandler`` dump.

    This is the thread that runs the call, without this library's outermost frames, and the number of other threads.
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
    """Send a signal to a thread of a process, or to its first thread if that is not known or not possible."""
    to_thread = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)
    if thread in (0, pid) or to_thread is None:
        os.kill(pid, signum)
    elif to_thread(pid, thread, signum) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _catches(pid: int, signum: int) -> bool:
    """Return whether a process has a handler for the signal: SigCgt in /proc/<pid>/status, proc(5)."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


_KILLED = 1 << (signal.SIGKILL - 1)


class ProcessHandle(NamedTuple):
    """Identifies a rank's process for the agent of its node."""

    pid: int
    side: SideChannel | None
    log_paths: tuple[str, ...] = ()

    def same(self) -> reaper.Process | None:
        """Return the process, None if it has ended (also if its pid is in use again)."""
        process = reaper.look_at(self.pid)
        if process is None or self.side is None or process.started != self.side.started:
            return None
        return process

    def dies(self) -> bool:
        """Return whether the process was killed but has not ended yet; the end takes a while if it holds much memory.

        proc(5), ``status``: SIGKILL remains among the pending signals of the process.
        """
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/status", "rb") as status:
            return any(int(line.split()[1], 16) & _KILLED for line in status if line.startswith(b"ShdPnd:"))
        return False

    def open(self, fd: int, mode: str) -> IO[bytes]:
        """Open the file of a file descriptor of the process again, unbuffered."""
        return open(f"/proc/{self.pid}/fd/{fd}", mode, buffering=0)

    def page(self) -> bytes:
        """Return the page on which the process notes its calls.

        Raises:
            OSError: the process has ended.
        """
        if self.side is None:
            return b""
        with self.open(self.side.page, "rb") as file:
            return file.read(call_page.SIZE)

    def request(self, request: bytes) -> None:
        """Send a request to the control thread of the process, without waiting.

        Raises:
            OSError: the process has ended, or its queue of requests is full.
        """
        if self.side is None:
            return
        fd = os.open(f"/proc/{self.pid}/fd/{self.side.control}", os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(fd, request)
        finally:
            os.close(fd)


_TICK = os.sysconf("SC_CLK_TCK")
_QUERY = "index,uuid,utilization.gpu,memory.used,memory.total"
_GPUS_WITHIN_S = 3.0
_MIB = 2**20


class Usage(NamedTuple):
    """Usage of a process: resident bytes, processor seconds, and the monotonic time of the measurement."""

    memory: int
    cpu_s: float
    at: float


class Gpu(NamedTuple):
    """An accelerator: ``use`` in percent of the time, memory in bytes."""

    number: str
    uuid: str
    use: float | None
    used: int
    total: int


def usage_of(pid: int, started: int) -> Usage | None:
    """Return the usage of a process, None if the pid has ended or has another start time (clock ticks since boot)."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()  # proc(5): from field 3 on
        if int(fields[19]) == started:
            cpu_s = (int(fields[11]) + int(fields[12])) / _TICK
            return Usage(reaper.resident_bytes(pid), cpu_s, time.monotonic())
    return None


def gpus() -> list[Gpu]:
    """Return the NVIDIA accelerators of this node according to ``nvidia-smi``; none without that program."""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_GPUS_WITHIN_S)
        return read_gpus(ran.stdout) if ran.returncode == 0 else []
    return []


def read_gpus(text: str) -> list[Gpu]:
    """Parse ``nvidia-smi --query-gpu=... --format=csv,noheader,nounits``; memory there is in MiB."""
    found: list[Gpu] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 5:
            use, used, total = (_number(cell) for cell in cells[2:])
            found.append(Gpu(cells[0], cells[1], use, int((used or 0) * _MIB), int((total or 0) * _MIB)))
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # "[N/A]", as of a partition
