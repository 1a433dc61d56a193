"""A page of shared memory with the running calls of a rank, readable while the rank cannot respond.

A worker process writes the number and method of each call when the call begins, and clears them when it ends. The
node's agent opens the page through ``/proc/<pid>/fd`` and reads it, also while the worker is inside native code, holds
the GIL or was stopped by a signal. The agent writes the numbers of cancelled calls there.

A request to a rank is a single byte in its pipe. The rank writes its stacks to a file, complete between two marks.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from dataclasses import dataclass

CALLS = 1024
"""Running calls, and cancelled calls, that a page holds."""

#: In traces, the number of the call that makes a process a rank. The numbers of a group's calls are far larger.
SETUP_CALL = 1

#: Requests: interrupt cancelled calls; shut down the connections of process groups; write the stacks of threads.
INTERRUPT, SEVER, STACKS = b"i", b"s", b"d"
_BEGIN, _END = b"\n<stacks of all threads>\n", b"\n</stacks of all threads>\n"

# The page: count of cancelled calls, thread, slots of running calls, cancelled calls, status line.
_NUMBER = struct.Struct("<Q")
_NUMBERS = struct.Struct(f"<{CALLS}Q")
_RUNNING = struct.Struct("<Qd64s")  # number of the call, its start on the node's monotonic clock, its method
_TEXT = struct.Struct("256s")
_THREAD_AT = 8
_RUNNING_AT = 64
_CANCELLED_AT = _RUNNING_AT + CALLS * _RUNNING.size
_TEXT_AT = _CANCELLED_AT + _NUMBERS.size
SIZE = _TEXT_AT + _TEXT.size


class CallPage:
    """The rank's side, with a slot per concurrent call; a synchronous rank uses the first slot only.

    Attributes:
        fd: file descriptor of the page.
        memory: the page.
        free: places of slots without a call, the first slot last.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("phalanx-calls")
        os.ftruncate(self.fd, SIZE)
        self.memory = mmap.mmap(self.fd, SIZE)
        self.free = list(range(_RUNNING_AT, _CANCELLED_AT, _RUNNING.size))[::-1]

    def runs_on(self, thread: int) -> None:
        """Record the kernel's id of the thread that runs constructors and methods."""
        _NUMBER.pack_into(self.memory, _THREAD_AT, thread)

    def tell(self, text: str) -> None:
        """Set the status line, of up to 256 bytes."""
        _TEXT.pack_into(self.memory, _TEXT_AT, text.encode(errors="backslashreplace"))

    def cancelled(self, call: int) -> bool:
        """Return whether a call was cancelled."""
        known = call != 0 and self.memory[:8] != b"\0" * 8  # an unused entry is 0
        return known and call in _NUMBERS.unpack_from(self.memory, _CANCELLED_AT)


class Listed:
    """A block in which a page shows a call as running, if a slot is free. A generator would take several times longer.

    ``method`` is the full name, of which the page keeps 64 bytes.
    """

    __slots__ = ("_at", "_call", "_method", "_page")

    def __init__(self, page: CallPage, call: int, method: str) -> None:
        self._page, self._call, self._method = page, call, method

    def __enter__(self) -> None:
        self._at = self._page.free.pop() if self._page.free else None
        if self._at is not None:
            name = self._method.encode(errors="backslashreplace")
            _RUNNING.pack_into(self._page.memory, self._at, self._call, time.monotonic(), name)

    def __exit__(self, *_: object) -> None:
        if self._at is not None:
            _NUMBER.pack_into(self._page.memory, self._at, 0)
            self._page.free.append(self._at)


@dataclass(frozen=True)
class CallPageState:
    """Contents of a page: start and method of the running calls by number, status line, and thread that runs the calls
    (0: unknown)."""

    running: dict[int, float]
    methods: dict[int, str]
    status: str = ""
    thread: int = 0


def read(page: bytes) -> CallPageState:
    """Return the contents of a page, given its bytes."""
    slots = [slot for slot in _RUNNING.iter_unpack(page[_RUNNING_AT:_CANCELLED_AT]) if slot[0]]
    return CallPageState(
        running={call: begun for call, begun, _ in slots},
        methods={call: _text(name) for call, _, name in slots},
        status=_text(page[_TEXT_AT:SIZE]),
        thread=_NUMBER.unpack_from(page, _THREAD_AT)[0],
    )


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


def cancel(fd: int, call: int) -> None:
    """Write the number of a cancelled call to the page of ``fd``; if the page is full, it replaces the oldest number.

    The number is written before the count that announces it. Only agents of the node write cancelled calls.
    """
    fcntl.flock(fd, fcntl.LOCK_EX)  # other threads and processes cancel calls, too
    (count,) = _NUMBER.unpack(os.pread(fd, 8, 0))
    os.pwrite(fd, _NUMBER.pack(call), _CANCELLED_AT + count % CALLS * _NUMBER.size)
    os.pwrite(fd, _NUMBER.pack(count + 1), 0)
    fcntl.flock(fd, fcntl.LOCK_UN)  # a forked process may keep the file open


def answer(stacks: str) -> bytes:
    """Return the response to a request for stacks, to be written with a single ``write``."""
    return _BEGIN + stacks.encode(errors="backslashreplace") + _END


def answered(written: bytes) -> bytes | None:
    """Return the last complete response, or None if there is none."""
    _, begin, stacks = written.rpartition(_END)[0].rpartition(_BEGIN)
    return stacks if begin else None
