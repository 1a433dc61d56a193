"""Workers that fail on request, and checks of processes and time."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import phalanx as px
from phalanx.testing import faults

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

DAEMON = """
import os, time
if os.fork():
    os._exit(0)
os.setsid()
print(os.getpid(), flush=True)
time.sleep(973)
"""


class Trouble(px.Worker):
    def __init__(self, hang_on: int | None = None) -> None:
        self.loaded = 0
        self.closed_file: str | None = None
        if self.rank == hang_on:
            stuck_here()

    def close(self) -> None:
        if self.closed_file:
            Path(self.closed_file).write_text(f"rank {self.rank} closed")

    @px.register
    def ping(self) -> int:
        return self.rank

    @px.register
    def pid(self) -> int:
        return os.getpid()

    @px.register
    def join(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")

    @px.register
    def reduce(self, failing: int | None = None) -> float:
        import torch
        import torch.distributed as dist

        if self.rank == failing:
            raise ValueError("bad batch")
        total = torch.ones(1)
        dist.all_reduce(total)
        return float(total)

    @px.register(px.Dispatch.ROWS)
    def refuse(self, size: int) -> None:
        raise ValueError(f"size {size} is not a multiple of 8")

    @px.register
    def die(self, rank: int, how: str) -> None:
        print(f"rank {self.rank} goes by {how}")
        if self.rank == rank:
            leave(how)
        time.sleep(60)

    @px.register
    def throw(self, kind: str) -> Any:
        if kind == "surrogate":
            raise ValueError("unexpected file \udce9")
        if kind == "interrupt":
            raise KeyboardInterrupt("by hand")
        if kind == "group":
            raise BaseExceptionGroup("several", [KeyboardInterrupt("by hand"), ValueError("x")])
        return threading.Lock()

    @px.register
    def nap(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    @px.register
    def hold(self, gate: str) -> int:
        while not os.path.exists(gate):
            time.sleep(0.01)
        return self.rank

    @px.register
    def spin_natively(self) -> None:
        import re

        re.match(r"(a+)+$", "a" * 40 + "b")  # hours in C, holding the GIL

    @px.register(rerun_on_restart=True)
    def load(self, step: int) -> None:
        self.loaded = step

    @px.register
    def what_is_loaded(self) -> int:
        return self.loaded

    @px.register
    def leave_children(self) -> list[int]:
        """Start a child, a child in its own session, and an orphaned daemon; return their pids."""
        plain = subprocess.Popen(["sleep", "971"])
        session = subprocess.Popen(["sleep", "972"], start_new_session=True)
        daemon = subprocess.Popen([sys.executable, "-S", "-c", DAEMON], stdout=subprocess.PIPE, text=True)
        return [plain.pid, session.pid, int(daemon.stdout.readline())]

    @px.register
    def note_close(self, path: str) -> None:
        self.closed_file = path

    @px.register(replicated=True)
    def norm(self, odd: int | None = None) -> float:
        return 1.0 if self.rank == odd else 2.0

    @px.register(replicated=True, collect="none")
    def keep_a_lock(self) -> Any:
        return threading.Lock()


def stuck_here() -> None:
    time.sleep(60)


def leave(how: str) -> None:
    if how == "exit":
        sys.exit(7)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "abort":
        os.abort()
    os.kill(os.getpid(), getattr(signal, how))


def is_there(pid: int) -> bool:
    """Return whether a process runs. A zombie does not run."""
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
        return state != b"Z"
    return False


def left_of_driver(pids: Sequence[int], name: str) -> list[object]:
    """Return those of these processes, and of the placement groups with ``name`` in their names, that still exist."""
    from ray.util.placement_group import placement_group_table

    reserved = [one["name"] for one in placement_group_table().values() if one["state"] != "REMOVED"]
    return [*filter(is_there, pids), *(one for one in reserved if name in one)]


def lose(group: px.WorkerGroup, *ranks: int, call: Callable[[], object]) -> None:
    """Kill ranks, and see a call fail."""
    import pytest  # not at the top, since ranks import this module

    for rank in ranks:
        faults.kill(group, rank)
    with pytest.raises(px.PhalanxError):
        call()


def all_running(group: px.WorkerGroup, count: int | None = None) -> bool:
    """Return whether each of the first ``count`` ranks runs a call."""
    core = group.core
    return all(status.running for status in core.backend.inspect(core.endpoints[:count], False))


class Unloaded:
    """A clock that runs slower while more threads want to run than the machine has cores."""

    def __init__(self) -> None:
        self._passed, self._last = 0.0, time.monotonic()

    def passed(self) -> float:
        """Return the seconds that have passed. Call it often."""
        wanted = 1.0
        with contextlib.suppress(OSError):  # not on Linux
            running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
            wanted = max(wanted, int(running) / (os.cpu_count() or 1))
        now = time.monotonic()
        self._passed, self._last = self._passed + (now - self._last) / wanted, now
        return self._passed


def within(seconds: float, condition: Callable[[], Any]) -> bool:
    """Return whether a condition becomes true in time."""
    clock = Unloaded()
    while clock.passed() < seconds:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())


@contextlib.contextmanager
def taking_less_than(seconds: float) -> Generator[None]:
    """Fail if the block takes longer."""
    clock, over = Unloaded(), threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            clock.passed()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()
    took = clock.passed()
    assert took < seconds, f"took {took:.2f} s, less what others of this machine took"
