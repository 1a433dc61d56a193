"""Lock of a path, so that a single driver writes to it at a time.

On a file system the kernel releases the lock with the process. Stores have no locks: there the newest driver claims
the path, and a driver that lost its claim commits nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import time
from datetime import datetime

from phalanx.checkpoint.storage import Storage, storage_errors
from phalanx.errors import CheckpointLocked

LOCK = ".lock"
CLAIM = "claim.txt"
_WAIT_S, _PAUSE_S = 0.1, 0.05
"""Seconds to wait for a locked file: a process that looks for the holder has the lock for a moment."""

_locks: dict[str, PathLock] = {}
_guard = threading.Lock()


class PathLock:
    """The right of this process to write to a path. It is released as often as it was acquired.

    Attributes:
        turn: held by the step that is written; the next step of the path waits for it.
    """

    def __init__(self, storage: Storage) -> None:
        self.turn = threading.Lock()
        self._storage, self._users, self._pid = storage, 0, os.getpid()
        since = datetime.now().isoformat(sep=" ")
        self._claim = f"pid {self._pid} on host {socket.gethostname()} since {since}".encode()
        self._file = _locked_file(storage, self._claim) if storage.is_local else -1
        if not storage.is_local:
            storage.write(CLAIM, self._claim)

    @classmethod
    def acquire(cls, storage: Storage) -> PathLock:
        """Acquire the lock of a path, or acquire it again.

        Raises:
            CheckpointLocked: if another process has it.
            CheckpointError: if the path cannot be written.
        """
        storage.make("")
        with _guard:
            lock = _locks.get(storage.root)
            if lock is None or lock._pid != os.getpid():  # a forked process has to lock for itself
                lock = _locks[storage.root] = cls(storage)
            lock._users += 1
            return lock

    def check(self) -> None:
        """Check that no other driver has claimed the path since.

        Raises:
            CheckpointLocked: if another driver has claimed it.
        """
        found = None if self._storage.is_local else self._storage.read(CLAIM)
        if found is not None and found != self._claim:
            raise CheckpointLocked(
                f"{self._storage.root} was claimed by {_holder(found)} while this process wrote to it, so this process "
                "commits nothing there any more; end one of the drivers",
                holder=_holder(found),
            )

    def release(self) -> None:
        """Release the lock."""
        with _guard:
            self._users -= 1
            if self._users:
                return
            if _locks.get(self._storage.root) is self:
                del _locks[self._storage.root]
            if self._storage.is_local:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, 0)
                os.close(self._file)
            elif self._storage.read(CLAIM) == self._claim:
                self._storage.remove(CLAIM)


def _locked_file(storage: Storage, claim: bytes) -> int:
    path = f"{storage.root}/{LOCK}"
    with storage_errors(path, "locked"):
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    until = time.monotonic() + _WAIT_S
    while (other := _lock(file, fcntl.LOCK_EX)) is not None:
        if time.monotonic() > until:
            os.close(file)
            raise CheckpointLocked(
                f"{storage.root} is held by {other}: one driver saves to a path at a time; end that driver, or choose "
                "another path",
                holder=other,
            )
        time.sleep(_PAUSE_S)
    os.ftruncate(file, 0)
    os.pwrite(file, claim, 0)
    return file


def holder_of(storage: Storage) -> str | None:
    """Return the process that may write to a path, as text; None if there is none."""
    if not storage.is_local:
        claim = storage.read(CLAIM)
        return None if claim is None else f"claimed by {_holder(claim)}"
    try:
        file = os.open(f"{storage.root}/{LOCK}", os.O_RDONLY)
    except OSError:
        return None
    try:
        other = _lock(file, fcntl.LOCK_SH)
        return None if other is None else f"held by {other}"
    finally:
        os.close(file)


def _lock(file: int, kind: int) -> str | None:
    """Lock an open file. Return the holder if another process has locked it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(os.pread(file, 1 << 10, 0))
    except OSError:
        pass  # a file system without locks promises less
    return None


def _holder(claim: bytes) -> str:
    return claim.decode(errors="replace") or "a process that did not say its name"
