"""Folders of temporary files that end with their process, however it ends.

A process removes its own at its exit. One that is killed cannot, so the next that makes a folder removes what others
left: an owner holds a lock in its folder, which the system gives back when he is gone. Unlike a process id it cannot be
somebody else's by then, and it says the same to processes that do not see each other, such as those of containers that
share a folder of temporary files.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import threading
import time

_PREFIX = "phalanx-inline-"
_LOCK = "owner"
_UNLOCKED_S = 3600.0
"""Between the making of a folder and its lock there are microseconds; one without a lock for so long gets none."""


class OwnFolder:
    """A new folder; it is removed by :meth:`close`, at the exit of this process, or, if that is killed, by the next
    one that makes such a folder. ``path`` says where.
    """

    def __init__(self) -> None:
        sweep(tempfile.gettempdir())
        self._pid = os.getpid()
        while True:
            self.path = tempfile.mkdtemp(prefix=_PREFIX)
            with contextlib.suppress(_TakenAway):
                self._lock = _locked(self.path)
                break
        atexit.register(self.close)

    @property
    def usable(self) -> bool:
        """Whether it is of this process, which may have been forked, and nobody removed it."""
        return os.getpid() == self._pid and os.path.isdir(self.path)

    def close(self) -> None:
        """Remove it."""
        lock, self._lock = self._lock, None
        if os.getpid() != self._pid:  # a process that was forked has the same object
            return
        atexit.unregister(self.close)
        shutil.rmtree(self.path, ignore_errors=True)
        if lock is not None:
            os.close(lock)


_shared: list[OwnFolder] = []
_sharing = threading.Lock()


def new_folder() -> str:
    """A new folder inside of the one that all users of this process share: each of those costs an open file."""
    with _sharing:
        if not _shared or not _shared[0].usable:
            _shared[:] = [OwnFolder()]
        return tempfile.mkdtemp(prefix="", dir=_shared[0].path)


def sweep(place: str) -> None:
    """Remove the folders of killed processes of this user in ``place``."""
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                with contextlib.suppress(OSError):
                    _remove_ownerless(entry)


def _remove_ownerless(entry: os.DirEntry[str]) -> None:
    told = entry.stat(follow_symlinks=False)
    if not entry.is_dir(follow_symlinks=False) or told.st_uid != os.getuid():
        return
    try:
        lock = os.open(os.path.join(entry.path, _LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        if told.st_mtime < time.time() - _UNLOCKED_S:
            shutil.rmtree(entry.path, ignore_errors=True)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where the owner lives
        shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        os.close(lock)


class _TakenAway(Exception):
    """Another process took the folder for one that was left."""


def _locked(folder: str) -> int | None:
    """The lock of a folder that was just made; None where files cannot be locked, so that nobody sweeps there.

    Raises:
        _TakenAway: somebody was faster.
    """
    path = os.path.join(folder, _LOCK)
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise _TakenAway from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(path)):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        os.close(lock)
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            return None
        raise
    os.close(lock)
    raise _TakenAway
