"""State that the contenders save and load: tensors of 8 MB, a quarter of the rows on each of four ranks."""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bench.contenders.weights import SHARDED, is_at, source_tensors, train

RANKS = 4
_STEP_SIZE, _STEP_TURNS = 512, 60


class SavedState:
    """State of a rank."""

    def __init__(self, megabytes: int, rank: int) -> None:
        self.tensors = source_tensors(SHARDED, megabytes, rank)
        self._factor = torch.full((_STEP_SIZE, _STEP_SIZE), 1e-3)

    def change(self, step: int) -> None:
        train(self.tensors, step)

    def is_at(self, step: int) -> bool:
        return is_at(self.tensors, step)

    def work(self) -> float:
        """Run a trainer's step: products of matrices."""
        found = self._factor
        for _ in range(_STEP_TURNS):
            found = found @ self._factor
        return float(found[0, 0])


class SaveRoles(ABC):
    """The ranks of a contender, made once for a size."""

    def __init__(self, megabytes: int) -> None:
        self.megabytes = megabytes

    @abstractmethod
    def change(self, step: int) -> None:
        """Set the state of all ranks to that of a step."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Save, and return when all is on disk."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Load the saved state."""

    @abstractmethod
    def is_at(self, step: int) -> bool:
        """Return whether all ranks have the state of that step."""

    @abstractmethod
    def close(self) -> None:
        """End the ranks."""

    def begin(self, folder: Path) -> None:
        """Begin a save, and return when the state may change."""
        raise NotImplementedError(f"{type(self).__name__} saves nothing beside its steps")

    def end(self) -> None:
        """Wait until the begun save is on disk."""
        raise NotImplementedError(f"{type(self).__name__} saves nothing beside its steps")

    def work(self) -> None:
        """Run a step on every rank."""
        raise NotImplementedError(f"{type(self).__name__} has no steps")


class DiskRoles(SaveRoles):
    """The disk's own speed: a thread per rank writes the rank's bytes past the page cache, and syncs the file."""

    def __init__(self, megabytes: int) -> None:
        super().__init__(megabytes)
        self._states = [SavedState(megabytes, rank) for rank in range(RANKS)]
        for state in self._states:
            state.tensors = {name: _from_a_page_on(tensor) for name, tensor in state.tensors.items()}
        self._threads = ThreadPoolExecutor(RANKS)

    def change(self, step: int) -> None:
        for state in self._states:
            state.change(step)

    def save(self, folder: Path) -> None:
        list(self._threads.map(lambda rank: self._write(folder, rank), range(RANKS)))

    def _write(self, folder: Path, rank: int) -> None:
        file = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        for data in self._bytes(rank):
            _all(os.write(file, data), data)
        os.fsync(file)
        os.close(file)

    def load(self, folder: Path) -> None:
        list(self._threads.map(lambda rank: self._read(folder, rank), range(RANKS)))

    def _read(self, folder: Path, rank: int) -> None:
        file = os.open(folder / str(rank), os.O_RDONLY | os.O_DIRECT)
        for data in self._bytes(rank):
            _all(os.readv(file, [data]), data)
        os.close(file)

    def _bytes(self, rank: int) -> list[memoryview]:
        tensors = self._states[rank].tensors.values()
        return [memoryview(tensor.view(torch.uint8).numpy()).cast("B") for tensor in tensors]

    def is_at(self, step: int) -> bool:
        return all(state.is_at(step) for state in self._states)

    def close(self) -> None:
        self._threads.shutdown()


def _all(count: int, data: memoryview) -> None:
    if count != len(data):
        raise RuntimeError(f"the disk took or gave {count} of {len(data)} bytes: is it full?")


def _from_a_page_on(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that begins at a page, which the disk can read and write directly."""
    room = torch.frombuffer(mmap.mmap(-1, tensor.nbytes), dtype=tensor.dtype).view(tensor.shape)
    return room.copy_(tensor)


def forget(folder: Path) -> None:
    """Drop files from the page cache, so that they are read from disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
