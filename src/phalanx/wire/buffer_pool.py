"""Large blocks of memory that are used again: what is received in every step lies where the last step's lay.

Fresh memory costs more than the copy that fills it: the kernel clears each page when it is first touched. A block
that was freed is therefore kept for the next one of its size. While it is kept the kernel may take its pages back
whenever memory is short (``MADV_FREE``, madvise(2)): a kept block is a favour, not a claim.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections import deque
from typing import Any

import numpy as np

__all__ = ["Pool", "pool"]

_HUGE_PAGE = 2 << 20
_SLACK = 1.25  # a kept block serves for anything that fills at least 1/1.25 of it
_SHARE_OF_MEMORY = 64  # a process keeps this part of the machine's memory at most
_FALLBACK_KEPT = 512 << 20

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class _Region:
    """Private anonymous memory in huge pages, where the system has them, from a whole one on."""

    __slots__ = ("_map", "address", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._advise("MADV_HUGEPAGE")
        begin: int = np.frombuffer(self._map, dtype=np.uint8).__array_interface__["data"][0]
        self.address = -(-begin // _HUGE_PAGE) * _HUGE_PAGE

    def lend_to_kernel(self) -> None:
        """Let the kernel take the pages back if it needs memory; whoever writes to them next has them again."""
        self._advise("MADV_FREE")

    def _advise(self, advice: str) -> None:
        try:
            self._map.madvise(getattr(mmap, advice))
        except (OSError, AttributeError):  # an older kernel: the block is plain memory, or is simply kept
            return


class _Lease:
    """The use of a region by one block, in the form in which NumPy takes memory; ends with its last user."""

    __slots__ = ("__array_interface__", "_pool", "_region")

    def __init__(self, owner: Pool, region: _Region, nbytes: int) -> None:
        self._pool = owner
        self._region = region
        self.__array_interface__ = {
            "data": (region.address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        self._pool.give_back(self._region)


class Pool:
    """Regions that are not in use, to be used again. ``most`` is how many bytes of them are kept."""

    def __init__(self, most: int) -> None:
        self._most = most
        # Its operations are atomic: blocks are freed on any thread, at any time.
        self._kept: deque[_Region] = deque()

    @property
    def kept_bytes(self) -> int:
        """Bytes in regions that are kept now."""
        return sum(region.nbytes for region in list(self._kept))

    def block(self, nbytes: int) -> Bytes:
        """``nbytes`` of writable memory with arbitrary content, given back with its last user."""
        return np.asarray(_Lease(self, self._find(nbytes) or _Region(_rounded(nbytes)), nbytes))

    def _find(self, nbytes: int) -> _Region | None:
        """A kept region of about that size, the one freed last; those of other sizes stay."""
        passed: list[_Region] = []
        found: _Region | None = None
        while found is None:
            try:
                region = self._kept.pop()
            except IndexError:
                break
            if nbytes <= region.nbytes <= _rounded(nbytes) * _SLACK:
                found = region
            else:
                passed.append(region)
        self._kept.extend(reversed(passed))
        return found

    def give_back(self, region: _Region) -> None:
        """Keep a region; the ones kept longest go where there are too many bytes."""
        if region.nbytes > self._most:
            return
        region.lend_to_kernel()
        self._kept.append(region)
        while self.kept_bytes > self._most:
            try:
                self._kept.popleft()
            except IndexError:
                return

    def clear(self) -> None:
        """Free what is kept."""
        self._kept.clear()


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE


def _most_kept() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _SHARE_OF_MEMORY
    except (ValueError, OSError, AttributeError):
        return _FALLBACK_KEPT


#: The blocks of this process; None where the system has no private anonymous memory of this kind.
pool: Pool | None = Pool(_most_kept()) if sys.platform.startswith("linux") else None
