"""A page of shared memory in which a rank says what it is doing, readable while the rank itself cannot answer.

A worker process writes the number of each call when it begins and ends it; a process beside it on the node opens
the page through ``/proc/<pid>/fd`` and reads it, also while the worker is inside native code, holds the GIL or was
stopped by a signal. The same page takes the numbers of calls that were cancelled. Linux only: elsewhere there is
no board, and nothing is known of a busy rank.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from dataclasses import dataclass

SIZE = 4096
SLOTS = 64
CANCELLED = 128

#: Number of the call that makes a process a rank; the calls of a group have numbers far above it.
SETUP_CALL = 1
CLOSE_CALL = 2
#: Number of every call that comes without a message.
BARE_CALL = 3

_RUNNING = struct.Struct("<Qd")  # call, when it began on the node's monotonic clock
_NUMBER = struct.Struct("<Q")
_RUNNING_AT = 64
_CANCELLED_AT = _RUNNING_AT + SLOTS * _RUNNING.size
_CANCELLED_COUNT_AT = 0


def available() -> bool:
    """Whether this platform has boards."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


class Board:
    """The rank's own side. One slot per call that runs at once; a synchronous rank uses the first one only."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("phalanx-board")
        os.ftruncate(self.fd, SIZE)
        self._page = mmap.mmap(self.fd, SIZE)
        self._free = list(range(SLOTS - 1, -1, -1))

    def begin(self, call: int) -> int:
        """Note that a call has begun; the slot to give to :meth:`end`. More calls than slots are not noted."""
        slot = self._free.pop() if self._free else SLOTS
        if slot < SLOTS:
            _RUNNING.pack_into(self._page, _RUNNING_AT + slot * _RUNNING.size, call, time.monotonic())
        return slot

    def end(self, slot: int) -> None:
        """Note that it has ended."""
        if slot < SLOTS:
            _RUNNING.pack_into(self._page, _RUNNING_AT + slot * _RUNNING.size, 0, 0.0)
            self._free.append(slot)

    def cancelled(self, call: int) -> bool:
        """Whether the call was cancelled."""
        if self._page[_CANCELLED_COUNT_AT : _CANCELLED_COUNT_AT + 8] == b"\0" * 8:
            return False
        return call in read(bytes(self._page)).cancelled


@dataclass(frozen=True)
class Reading:
    """What a board said: begin of each running call by its number, and the calls that were cancelled."""

    running: dict[int, float]
    cancelled: frozenset[int]


def read(page: bytes) -> Reading:
    """The content of a board."""
    running = {
        call: begun for call, begun in _RUNNING.iter_unpack(page[_RUNNING_AT:_CANCELLED_AT]) if call != 0
    }
    numbers = page[_CANCELLED_AT : _CANCELLED_AT + CANCELLED * _NUMBER.size]
    return Reading(running, frozenset(n for (n,) in _NUMBER.iter_unpack(numbers) if n != 0))


def cancel(fd: int, call: int) -> None:
    """Write the number of a cancelled call on the board behind ``fd``, in place of the oldest of many.

    The number stands before the count that announces it. There is one writer per node.
    """
    (count,) = _NUMBER.unpack(os.pread(fd, 8, _CANCELLED_COUNT_AT))
    os.pwrite(fd, _NUMBER.pack(call), _CANCELLED_AT + (count % CANCELLED) * _NUMBER.size)
    os.pwrite(fd, _NUMBER.pack(count + 1), _CANCELLED_COUNT_AT)
