"""Sockets of this process's process groups: noted while a group is created, and shut down to free a hanging rank."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Generator


class Collectives:
    """The sockets of process groups. Linux only: elsewhere none is known, and nothing is aborted."""

    def __init__(self) -> None:
        self._noted = set[str]()
        self._before: frozenset[str] | None = None
        self._blocks = 0
        self._lock = threading.Lock()
        self._kept_ports = set[int]()

    @contextlib.contextmanager
    def noting(self) -> Generator[None]:
        """Note all sockets that are opened during the block as sockets of a process group."""
        with self._lock:
            self._blocks += 1
            if self._before is None:
                self._before = frozenset(_sockets().values())
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if not self._blocks:  # the last of several threads, or the outermost block
                    self._noted |= set(_sockets().values()) - self._before
                    self._before = None

    def forget(self) -> None:
        """Forget the sockets of groups that were destroyed."""
        self._noted.clear()

    def keep_port(self, port: int) -> None:
        """Never shut down connections to this port of the rendezvous store, which other ranks still need."""
        self._kept_ports.add(port)

    def abort(self) -> None:
        """Shut the sockets down, so that a thread in a collective gets an error.

        gloo's own abort frees no thread, but closing its sockets does. Listeners have no peer and stay open, because
        gloo ends the process if a listener is shut down. Connections of Ray and of the rendezvous store stay open too:
        a rank that stays in its group needs them.
        """
        before = self._before
        for fd, name in _sockets().items():
            if name not in self._noted and (before is None or name in before):
                continue
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                if internet and connection.getsockname()[1] not in self._kept_ports:
                    connection.getpeername()  # raises for a listener
                    connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, str]:
    """Return the name of each socket of this process by file descriptor."""
    sockets: dict[int, str] = {}
    with contextlib.suppress(FileNotFoundError):
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{fd}")
                if target.startswith("socket:"):
                    sockets[int(fd)] = target
    return sockets


#: The process groups of this process.
collectives = Collectives()
