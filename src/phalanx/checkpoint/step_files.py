"""Files of a rank, which torch's distributed checkpoint writes: digested, and written past the page cache.

A copy into the page cache takes a core, which the training step needs during a submitted save.
"""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.storage import WriteResult

from phalanx.checkpoint.planners import LoadPlanner
from phalanx.checkpoint.storage import FileInfo, Storage, storage_errors
from phalanx.errors import CheckpointError

_BLOCK = 4 << 20
_PAGE = 4096
_O_DIRECT = getattr(os, "O_DIRECT", 0)  # not on every platform
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)
METADATA = ".metadata"

WrittenItems = tuple[list[WriteResult], dict[str, FileInfo]]
"""Places of the items of a rank's plan, and facts of the files."""


class DirectFile(io.FileIO):
    """A new file, written in blocks past the page cache if the file system allows it."""

    def __init__(self, path: str) -> None:
        super().__init__(path, "w")
        self._set_direct(True)

    def write(self, block: Any) -> int:
        """Write a block that begins at a page of memory. Only the last block may end within a page."""
        rest = memoryview(block)
        while rest:
            if len(rest) % _PAGE:
                self._set_direct(False)
            try:
                rest = rest[os.write(self.fileno(), rest) :]
            except OSError as error:
                if error.errno not in _REFUSED or not self._is_direct:
                    raise
                self._set_direct(False)  # some file systems refuse it only here
        return len(block)

    def _set_direct(self, on: bool) -> None:
        flags = fcntl.fcntl(self.fileno(), fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.fileno(), fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
            self._is_direct = on
        except OSError:  # not every file system supports it
            self._is_direct = False


class OutputStream(io.RawIOBase):
    """A stream that gathers blocks, digests and writes them.

    Attributes:
        error: the first error. ``torch.save`` raises another error in its place.
    """

    def __init__(self, write: Callable[[memoryview], object], check: Callable[[], object]) -> None:
        self._write, self._check = write, check
        self._block = memoryview(mmap.mmap(-1, _BLOCK))
        self._filled, self._size = 0, 0
        self._digest = xxhash.xxh3_128()
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        rest = np.frombuffer(data, np.uint8)
        count = len(rest)
        block = np.frombuffer(self._block, np.uint8)
        while len(rest):
            part = rest[: _BLOCK - self._filled]
            block[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            rest = rest[len(part) :]
            if self._filled == _BLOCK:
                self._put()
        self._size += count
        return count

    def tell(self) -> int:
        return self._size

    def finish(self) -> FileInfo:
        """Write the last block, and return the facts of the file."""
        self._put()
        return FileInfo(self._size, self._digest.hexdigest())

    def _put(self) -> None:
        block, self._filled = self._block[: self._filled], 0
        try:
            self._check()
            self._digest.update(block)
            self._write(block)
        except BaseException as error:
            self.error = self.error or error
            raise


class StepFiles:
    """The files of a folder, with the methods of torch's ``FileSystemBase`` that write and read data.

    Args:
        folder: an absolute path or a URL.
        check: function that is called before each block, and raises an error to stop the writing.
    """

    def __init__(self, folder: str, check: Callable[[], object] = lambda: None) -> None:
        self._storage = Storage(folder)
        self._check = check
        #: Facts of the files that were written, by name.
        self.facts: dict[str, FileInfo] = {}

    @contextmanager
    def create_stream(self, path: str, mode: str) -> Generator[Any]:
        name, writes = os.path.basename(path), "w" in mode
        direct = writes and self._storage.is_local
        with DirectFile(f"{self._storage.root}/{name}") if direct else self._storage.open(name, mode) as file:
            if not writes:
                yield file
                return
            stream = OutputStream(file.write, self._check)
            try:
                yield stream
                self.facts[name] = stream.finish()
                if direct:
                    os.fsync(file.fileno())
            except BaseException as error:
                raise (stream.error or error) from None

    def concat_path(self, path: str, suffix: str) -> str:
        return f"{path}/{suffix}"


def write_items(
    folder: str, plan: dcp.SavePlan, planner: dcp.SavePlanner, check: Callable[[], object] = lambda: None
) -> WrittenItems:
    """Write the items of a rank's plan.

    Raises:
        CheckpointError: if a file cannot be written.
    """
    files = StepFiles(folder, check)
    # The streams sync the files themselves. A second thread of the writer would hide the error of a full disk.
    writer = dcp.FileSystemWriter(folder, sync_files=False, thread_count=1)
    writer.fs, writer.path = files, folder  # type: ignore[assignment]  # as torch's own FsspecWriter does
    try:
        with storage_errors(folder, "written"), _without_crc32():
            results = writer.write_data(plan, planner).value()
    except CheckpointError:
        with suppress(CheckpointError):  # frees space that a note of the error may need
            Storage(folder).remove(f"{plan.storage_data.prefix}0.distcp")
        raise
    if len(results) != len(plan.items):
        raise CheckpointError(f"torch wrote {len(results)} of {len(plan.items)} items to {folder}")
    return results, files.facts


@contextmanager
def _without_crc32() -> Generator[None]:
    """Omit the CRC32 of each tensor, a third of the processor time of a save: every file has a digest.

    ``torch.load`` does not check it. The option is global: files that other threads write now lack the CRC32 too.
    """
    changes = torch.serialization.get_crc32_options()  # False if another save has changed the option
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        if changes:
            torch.serialization.set_crc32_options(True)


def read_items(folder: str, planner: LoadPlanner) -> None:
    """Read the items of a rank's plan."""
    reader = dcp.FileSystemReader(folder)
    reader.fs, reader.path = StepFiles(folder), folder  # type: ignore[assignment]
    reader.set_up_storage_reader(planner.metadata, is_coordinator=False)
    reader.read_data(planner.plan, planner).wait()
