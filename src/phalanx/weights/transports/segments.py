"""Shared memory without a name: gone with the last process that maps it, whatever kills them.

A segment is a memfd. Its file descriptor goes to readers over the unix socket that they hold anyway, so that nothing
needs to be found by a path (nor by the number of a process, which differs between containers), and it does not count
against the size of /dev/shm. The limit is the container's memory.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, Protocol

import torch

__all__ = ["HostSegment", "Segment", "SegmentKind", "host_segments"]


class Segment(Protocol):
    """Memory that two processes see. ``memory`` is all of it, as bytes."""

    memory: torch.Tensor

    def handle(self) -> tuple[bytes, list[int]]:
        """What another process needs to open it: some bytes, and file descriptors."""
        ...

    def settle(self) -> None:
        """Return when what was copied to or from ``memory`` is really there."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class SegmentKind(Protocol):
    """Where segments come from."""

    name: str

    def make(self, nbytes: int) -> Segment:
        """New memory of this process."""
        ...

    def open(self, nbytes: int, told: bytes, fds: list[int]) -> Segment:
        """Another process's memory, by its handle. Takes over ``fds``."""
        ...


class HostSegment:
    """Anonymous host memory behind a file descriptor, which it takes over."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd: int | None = fd
        self._map = mmap.mmap(fd, nbytes)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)

    def handle(self) -> tuple[bytes, list[int]]:
        """See :class:`Segment`."""
        return b"", [] if self._fd is None else [self._fd]

    def settle(self) -> None:
        """Copies of host memory are there when they return."""

    def forget_fd(self) -> None:
        """Keep the mapping alone: all that a reader needs."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Unmapped once nothing looks at :attr:`memory` any more."""
        self.forget_fd()
        self.memory = torch.empty(0, dtype=torch.uint8)
        empty: Any = None
        self._map = empty

    def __del__(self) -> None:
        self.forget_fd()  # of one whose mapping failed, or whose owner could not be made whole


class _HostSegments:
    name = "segments"

    def make(self, nbytes: int) -> HostSegment:
        fd = os.memfd_create("phalanx-weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
        except OSError:
            os.close(fd)
            raise
        return HostSegment(fd, nbytes)

    def open(self, nbytes: int, told: bytes, fds: list[int]) -> HostSegment:
        segment = HostSegment(fds[0], nbytes)
        segment.forget_fd()
        return segment


host_segments: SegmentKind = _HostSegments()
