"""A rank's process, reached through ``/proc`` from beside it on its node."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import NamedTuple

from phalanx.backends.ray import reaper
from phalanx.wire import call_page as side_channel
from phalanx.wire.messages import SideChannel

_KILLED = 1 << (signal.SIGKILL - 1)


class ProcessHandle(NamedTuple):
    """A rank's process as an agent needs to know it."""

    pid: int
    side: SideChannel | None
    log_paths: tuple[str, ...] = ()

    def same(self) -> reaper.Process | None:
        """The process, if it is there and is still the one that reported itself."""
        process = reaper.look_at(self.pid)
        if process is None or self.side is None or process.started != self.side.started:
            return None
        return process

    def dies(self) -> bool:
        """Return whether the process was killed and is on its way out, which takes a while where it holds much memory.

        proc(5), ``status``: SIGKILL stays among the signals that are pending for the whole process.
        """
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/status", "rb") as status:
            return any(int(line.split()[1], 16) & _KILLED for line in status if line.startswith(b"ShdPnd:"))
        return False

    def open(self, fd: int, flags: int) -> int:
        """One of the process's own file descriptors, opened anew."""
        return os.open(f"/proc/{self.pid}/fd/{fd}", flags)

    def page(self) -> bytes:
        """The page on which the process says what it is at.

        Raises:
            OSError: it is gone.
        """
        if self.side is None:
            return b""
        fd = self.open(self.side.page, os.O_RDONLY)
        try:
            return os.pread(fd, side_channel.SIZE, 0)
        finally:
            os.close(fd)

    def request(self, request: bytes) -> None:
        """Ask the thread of the process that is there for such requests; does not wait for it.

        Raises:
            OSError: it is gone, or was asked so often that no more is taken.
        """
        if self.side is None:
            return
        fd = self.open(self.side.control, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(fd, request)
        finally:
            os.close(fd)
