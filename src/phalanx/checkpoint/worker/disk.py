"""Files of this machine's file systems, written and read past the page cache where the file system can do that.

The system's own way copies every byte through the page cache, which costs a core for as long as it takes: that time is
missing to the step beside which a save is written. Past it (``O_DIRECT``) the disk reads and writes the memory of the
tensors itself. For that, a byte's place in its page of memory must be its place in its page of the file: see
:meth:`DiskFile.gap`. What the cache has is read from there.
"""

from __future__ import annotations

import errno
import mmap
import os
from types import TracebackType
from typing import Any

import numpy as np

__all__ = ["PAGE", "DiskFile", "DiskReader", "like_in_file"]

PAGE = 4096
"""What places and lengths are multiples of, past the cache: no file system asks for more."""
_GATHER = 1 << 20
_COPIED = 4 << 20
_ALIGNED = 64
_LARGE = 256 << 10
"""What is smaller than this is copied, and written together with its neighbours."""
_PAST_CACHE = getattr(os, "O_DIRECT", 0)  # not on every platform
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


class DiskFile:
    """A new file, written from its begin to its end; one that is there is replaced. Errors are ``OSError``."""

    def __init__(self, path: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._past_cache = bool(_PAST_CACHE)
        try:
            self._number = os.open(path, flags | _PAST_CACHE, 0o666)
        except OSError as error:
            if error.errno not in _REFUSED or not _PAST_CACHE:
                raise
            self._past_cache = False
            self._number = os.open(path, flags, 0o666)
        # Both begin at a page while the cache is passed by: what was written ends where the gathered bytes begin.
        self._written, self._filled = 0, 0
        self._gathered = memoryview(mmap.mmap(-1, _GATHER))

    def gap(self, data: memoryview, ahead: int) -> int:
        """How many bytes to leave out so that ``data``, which follows after ``ahead`` others, needs no copy."""
        if not self._past_cache or len(data) < _LARGE:
            return 0
        return (_address(data) - self._written - self._filled - ahead) % PAGE

    def write(self, data: Any) -> None:
        """Write all of ``data``, which stays as it is meanwhile. It is on the disk after :meth:`finish`."""
        left = memoryview(data).cast("B")
        while left:
            at = self._written + self._filled
            if len(left) >= _LARGE and not self._past_cache:
                self._put(left)
                return
            if len(left) >= _LARGE and (_address(left) - at) % PAGE == 0:
                head = -at % PAGE  # to where the page of both ends, never beyond what can be gathered
                whole = (len(left) - head) // PAGE * PAGE
                self._gather(left[:head])
                self._put(left[head : head + whole])
                left = left[head + whole :]
                continue
            taken = min(len(left), _GATHER - self._filled)
            self._gather(left[:taken])
            left = left[taken:]
            if self._filled == _GATHER:
                self._put()

    def finish(self) -> None:
        """Return when all is on the disk."""
        if self._past_cache:
            # A small file goes the system's own way.
            rest = self._filled % PAGE if self._written else self._filled
            last = bytes(self._gathered[self._filled - rest : self._filled])
            self._filled -= rest
            self._put()
            self._through_cache()
            self._gather(last)
        self._put()
        os.fsync(self._number)

    def __enter__(self) -> DiskFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._number)

    def _gather(self, data: memoryview | bytes) -> None:
        self._gathered[self._filled : self._filled + len(data)] = data
        self._filled += len(data)

    def _put(self, data: memoryview | None = None) -> None:
        """Have the system take what was gathered, and ``data`` after it."""
        parts = [self._gathered[: self._filled], *([] if data is None else [data])]
        parts = [part for part in parts if part]
        while parts:
            try:
                count = os.writev(self._number, parts)
            except OSError as error:
                if error.errno not in _REFUSED or not self._past_cache:
                    raise
                self._through_cache()  # some file systems refuse it only here
                continue
            self._written += count
            if count % PAGE and self._past_cache:  # it took less than it was given, and will say why
                self._through_cache()
            parts = _without(parts, count)
        self._filled = 0

    def _through_cache(self) -> None:
        """Write what follows as the system does by itself."""
        import fcntl  # not on every platform that can read what was saved

        if self._past_cache:
            flags = fcntl.fcntl(self._number, fcntl.F_GETFL)
            fcntl.fcntl(self._number, fcntl.F_SETFL, flags & ~_PAST_CACHE)
            self._past_cache = False


class DiskReader:
    """A file that is there. Errors are ``OSError``."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._past: int | None = None
        self._past_cache = bool(_PAST_CACHE) and hasattr(os, "RWF_NOWAIT")
        self._room = memoryview(b"")

    def read(self, start: int, into: memoryview) -> int:
        """Fill ``into`` with what lies from ``start`` on; how many bytes there were, fewer where the file ends."""
        done = 0
        if len(into) >= _LARGE and self._past_cache and not self._cached(start):
            try:
                done = self._read_past(start, into)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                self._past_cache = False
        while done < len(into):
            count = os.preadv(self._number, [into[done:]], start + done)
            if not count:
                break
            done += count
        return done

    def __enter__(self) -> DiskReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in (self._number, self._past):
            if number is not None:
                os.close(number)

    def _cached(self, start: int) -> bool:
        """Whether the cache has the page there, and so probably what follows."""
        try:
            return os.preadv(self._number, [bytearray(1)], start, os.RWF_NOWAIT) > 0
        except OSError as error:
            if error.errno in _REFUSED:  # nobody can tell
                self._past_cache = False
            return error.errno != errno.EAGAIN

    def _read_past(self, start: int, into: memoryview) -> int:
        if self._past is None:
            self._past = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | _PAST_CACHE)
        if (_address(into) - start) % PAGE:
            if not self._room:  # kept, since memory is slow when it is new
                self._room = memoryview(mmap.mmap(-1, _COPIED))
            return _read_copied(self._past, start, into, self._room)
        done = 0
        while len(into) - done >= _LARGE:
            count = _read_in_place(self._past, start + done, into[done:])
            if not count:
                break
            done += count
        return done


def _read_in_place(number: int, start: int, into: memoryview) -> int:
    """Whole pages to where they shall lie, the pages of both ends by a copy."""
    before = start % PAGE
    head = -start % PAGE
    whole = (len(into) - head) // PAGE * PAGE
    room = memoryview(mmap.mmap(-1, 2 * PAGE))
    first, body, last = room[: PAGE if head else 0], into[head : head + whole], room[PAGE:]
    count = os.preadv(number, [part for part in (first, body, last) if part], start - before)
    into[:head] = first[before:]
    tail = into[head + whole :]
    found = min(max(count - len(first) - whole, 0), len(tail))
    tail[:found] = last[:found]
    return min(max(count - before, 0), head + whole + found)


def _read_copied(number: int, start: int, into: memoryview, room: memoryview) -> int:
    """By way of ``room``, which begins at a page, where places in pages of the file and of memory differ."""
    source, target = np.frombuffer(room, np.uint8), np.frombuffer(into, np.uint8)
    done = 0
    while done < len(into):
        at = start + done
        count = min(os.preadv(number, [room], at - at % PAGE) - at % PAGE, len(into) - done)
        if count <= 0:
            break
        target[done : done + count] = source[at % PAGE : at % PAGE + count]
        done += count
    return done


def _address(data: memoryview) -> int:
    return np.frombuffer(data, np.uint8).__array_interface__["data"][0]


def like_in_file(room: Any, start: int, length: int) -> Any:
    """So much of an array of bytes, a page longer, as lies in its page as bytes from ``start`` on lie in a file.

    Of others than :meth:`DiskFile.gap` gave a place, ``start`` may be any: elements lie by their size in memory.
    """
    skipped = (start - room.__array_interface__["data"][0]) % PAGE if start % _ALIGNED == 0 else 0
    return room[skipped : skipped + length]


def _without(parts: list[memoryview], count: int) -> list[memoryview]:
    left: list[memoryview] = []
    for part in parts:
        dropped = min(count, len(part))
        count -= dropped
        if dropped < len(part):
            left.append(part[dropped:])
    return left
