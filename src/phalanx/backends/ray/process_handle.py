"""A rank's process, reached through ``/proc`` from another process of its node."""

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

    def open(self, fd: int, flags: int) -> int:
        """Open the file of a file descriptor of the process again."""
        return os.open(f"/proc/{self.pid}/fd/{fd}", flags)

    def page(self) -> bytes:
        """Return the page on which the process notes its calls.

        Raises:
            OSError: the process has ended.
        """
        if self.side is None:
            return b""
        fd = self.open(self.side.page, os.O_RDONLY)
        try:
            return os.pread(fd, side_channel.SIZE, 0)
        finally:
            os.close(fd)

    def request(self, request: bytes) -> None:
        """Send a request to the control thread of the process, without waiting.

        Raises:
            OSError: the process has ended, or its queue of requests is full.
        """
        if self.side is None:
            return
        fd = self.open(self.side.control, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(fd, request)
        finally:
            os.close(fd)
