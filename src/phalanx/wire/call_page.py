"""A page of shared memory in which a rank says what it is doing, readable while the rank itself cannot answer.

A worker process writes number and method of each call when it begins it, and when it ends it; a process beside it on
the node opens the page through ``/proc/<pid>/fd`` and reads it, also while the worker is inside native code, holds the
GIL or was stopped by a signal. The same page takes the numbers of calls that were cancelled. Linux only: elsewhere
there is no such page, and nothing is known of a busy rank.

What is asked of a rank through its pipe is one byte each; its stacks come back in a file, as a whole between two marks.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from dataclasses import dataclass

SIZE = 12288
SLOTS = 64
CANCELLED = 128

#: Number of the call that makes a process a rank; the calls of a group have numbers far above it.
SETUP_CALL = 1
CLOSE_CALL = 2
#: Calls made past the library have no numbers that anybody knows; they all bear this one.
PLAIN_CALL = 3
#: Calls that come without a message are counted from here on by either side: by whoever sends them, and by the rank.
BARE_CALLS = 1 << 62

#: Requests: interrupt calls that were cancelled; cut the connections of process groups; write the stacks of threads.
INTERRUPT, SEVER, STACKS = b"i", b"s", b"d"
_BEGIN, _END = b"\n<stacks of all threads>\n", b"\n</stacks of all threads>\n"

_RUNNING = struct.Struct(
    "<QdQ"
)  # call, when it began on the node's monotonic clock, place of its method's name
_NUMBER = struct.Struct("<Q")
_RUNNING_AT = 64
_CANCELLED_AT = _RUNNING_AT + SLOTS * _RUNNING.size
_CANCELLED_COUNT_AT = 0
_THREAD_AT = 8
_TOLD_AT = _CANCELLED_AT + CANCELLED * _NUMBER.size
_TOLD_BYTES = 256
_NAMES_AT = 4096
_NAME_BYTES = 64
NAMES = (SIZE - _NAMES_AT) // _NAME_BYTES  # the first one stands for methods without a name here


def available() -> bool:
    """Whether this platform has such pages."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


class CallPage:
    """The rank's own side. One slot per call that runs at once; a synchronous rank uses the first one only."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("phalanx-calls")
        os.ftruncate(self.fd, SIZE)
        self._page = mmap.mmap(self.fd, SIZE)
        self._free = list(range(SLOTS - 1, -1, -1))
        self._names: dict[str, int] = {"": 0}

    def begin(self, call: int, method: str = "") -> int:
        """Note that a call has begun; the slot to give to :meth:`end`. More calls than slots are not noted.

        ``method`` is its name, with the role before a dot. A name is written when it is first met; beyond ``NAMES`` of
        them, and beyond 64 bytes of one, there is no room.
        """
        name = self._names.get(method)
        if name is None:
            name = self._note_name(method)
        slot = self._free.pop() if self._free else SLOTS
        if slot < SLOTS:
            at = _RUNNING_AT + slot * _RUNNING.size
            _RUNNING.pack_into(self._page, at, call, time.monotonic(), name)
        return slot

    def _note_name(self, method: str) -> int:
        if len(self._names) >= NAMES:
            return 0
        index = len(self._names)
        at = _NAMES_AT + index * _NAME_BYTES
        self._page[at : at + _NAME_BYTES] = method.encode(errors="backslashreplace")[:_NAME_BYTES].ljust(
            _NAME_BYTES, b"\0"
        )
        self._names[method] = index
        return index

    def end(self, slot: int) -> None:
        """Note that it has ended."""
        if slot < SLOTS:
            _RUNNING.pack_into(self._page, _RUNNING_AT + slot * _RUNNING.size, 0, 0.0, 0)
            self._free.append(slot)

    def runs_on(self, thread: int) -> None:
        """Say which thread runs constructors and methods, by the number that the kernel has for it."""
        _NUMBER.pack_into(self._page, _THREAD_AT, thread)

    def tell(self, text: str) -> None:
        """Say in a line how it stands, in place of what was said before; 256 bytes at most."""
        said = text.encode(errors="backslashreplace")[:_TOLD_BYTES].ljust(_TOLD_BYTES, b"\0")
        self._page[_TOLD_AT : _TOLD_AT + _TOLD_BYTES] = said

    def cancelled(self, call: int) -> bool:
        """Whether the call was cancelled."""
        if self._page[_CANCELLED_COUNT_AT : _CANCELLED_COUNT_AT + 8] == b"\0" * 8:
            return False
        numbers = self._page[_CANCELLED_AT : _CANCELLED_AT + CANCELLED * _NUMBER.size]
        return call != 0 and (call,) in _NUMBER.iter_unpack(numbers)  # a free place is 0


@dataclass(frozen=True)
class Reading:
    """What a page said: begin and method of each running call by its number, the calls that were cancelled, how the
    rank says itself that it stands, and the thread that runs its calls, 0 where it has not said."""

    running: dict[int, float]
    cancelled: frozenset[int]
    methods: dict[int, str]
    told: str = ""
    thread: int = 0


def read(page: bytes) -> Reading:
    """The content of a page."""
    slots = [slot for slot in _RUNNING.iter_unpack(page[_RUNNING_AT:_CANCELLED_AT]) if slot[0] != 0]
    numbers = page[_CANCELLED_AT : _CANCELLED_AT + CANCELLED * _NUMBER.size]
    return Reading(
        running={call: begun for call, begun, _ in slots},
        cancelled=frozenset(n for (n,) in _NUMBER.iter_unpack(numbers) if n != 0),
        methods={call: _name(page, index) for call, _, index in slots},
        told=page[_TOLD_AT : _TOLD_AT + _TOLD_BYTES].rstrip(b"\0").decode(errors="replace"),
        thread=int.from_bytes(page[_THREAD_AT : _THREAD_AT + _NUMBER.size], "little"),
    )


def _name(page: bytes, index: int) -> str:
    at = _NAMES_AT + index * _NAME_BYTES
    return page[at : at + _NAME_BYTES].rstrip(b"\0").decode(errors="replace")


def cancel(fd: int, call: int) -> None:
    """Write the number of a cancelled call on the page behind ``fd``, in place of the oldest of many.

    The number stands before the count that announces it. There is one writer per node.
    """
    (count,) = _NUMBER.unpack(os.pread(fd, 8, _CANCELLED_COUNT_AT))
    os.pwrite(fd, _NUMBER.pack(call), _CANCELLED_AT + (count % CANCELLED) * _NUMBER.size)
    os.pwrite(fd, _NUMBER.pack(count + 1), _CANCELLED_COUNT_AT)


def answer(stacks: str) -> bytes:
    """What a rank writes, in one piece, where it was asked for its stacks."""
    return _BEGIN + stacks.encode(errors="backslashreplace") + _END


def answered(written: bytes) -> bytes | None:
    """The last whole answer in what was written, if there is one."""
    before, _, _ = written.rpartition(_END)
    _, begin, stacks = before.rpartition(_BEGIN)
    return stacks if begin else None
