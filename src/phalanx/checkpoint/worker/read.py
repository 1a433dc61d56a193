"""Items of saved files, compared with their digests, into the tensors of a rank."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from phalanx.checkpoint.storage.read_plan import Fetch
from phalanx.checkpoint.storage.storage import advice, store_errors
from phalanx.checkpoint.storage.tensor_index import Catalogue, Piece
from phalanx.checkpoint.worker.disk import PAGE, DiskReader, like_in_file
from phalanx.checkpoint.worker.write import elements_of
from phalanx.errors import CheckpointCorrupted, CheckpointError
from phalanx.weights.planning.tensors import cut, dtype_named

__all__ = ["Files"]

_THREADS = 2
"""That read, on each rank: one waits for the disk while the other compares."""


class Files:
    """The files of a role that were saved in ``folder``: an absolute path, or a URL that fsspec knows."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._open: dict[tuple[str, int], _Reader] = {}
        self._scratch = np.empty(0, np.uint8)
        self.nbytes = 0

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._open.clear()

    def fill(self, catalogue: Catalogue, wanted: Sequence[Fetch], into: Mapping[str, torch.Tensor]) -> None:
        """Read pieces, each once, into local tensors by key.

        What stays where it is read goes there by threads: the disk has the next pieces to do while one is compared.

        Raises:
            CheckpointCorrupted: a file is missing, or not what was written.
        """
        held: tuple[Piece, torch.Tensor] | None = None
        placed: list[Future[int]] = []
        with torch.no_grad(), ThreadPoolExecutor(_THREADS, thread_name_prefix="phalanx-load") as threads:
            for one in wanted:
                if not one.piece.digest:  # nothing to compare: only the rows that are wanted
                    rows, source = self._rows(one, catalogue.tensors[one.key].dtype)
                    cut(into[one.key], one.target, one.sizes).copy_(cut(rows, source, one.sizes))
                    continue
                target = cut(into[one.key], one.target, one.sizes)
                if _fills(one, target):
                    placed.append(
                        threads.submit(self._checked, one.piece, one.piece.data, elements_of(target))
                    )
                    continue
                if held is None or held[0] != one.piece:
                    held = (one.piece, self._tensor(one.piece, catalogue.tensors[one.key].dtype))
                target.copy_(cut(held[1], one.source, one.sizes))
            try:
                self.nbytes += sum(piece.result() for piece in placed)
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise

    def value(self, piece: Piece) -> Any:
        """A value.

        Raises:
            CheckpointCorrupted: its file is missing, or not what was written.
        """
        data = bytes(self._bytes(piece, piece.offset, piece.length))
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)

    def _tensor(self, piece: Piece, dtype: str) -> torch.Tensor:
        if piece.data < 0 or piece.box is None:
            return self.value(piece)
        kind = dtype_named(dtype)
        sizes = piece.box.sizes
        count = int(np.prod(sizes, dtype=np.int64))
        data = self._bytes(piece, piece.data, count * kind.itemsize)
        return torch.from_numpy(data).view(kind).view(sizes)

    def _rows(self, one: Fetch, dtype: str) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Those rows of a whole tensor in which the wanted part lies, and where it lies in them."""
        kind, box = dtype_named(dtype), one.piece.box
        shape = () if box is None else box.sizes
        first, count = (one.source[0], one.sizes[0]) if shape else (0, 1)
        row = int(np.prod(shape[1:], dtype=np.int64)) * kind.itemsize
        data = self._bytes(one.piece, one.piece.data + first * row, count * row)
        rows = torch.from_numpy(data).view(kind).view((count, *shape[1:]) if shape else ())
        return rows, (0, *one.source[1:]) if shape else ()

    def _bytes(self, piece: Piece, start: int, length: int) -> Any:
        """In memory that is used again by the next read."""
        if len(self._scratch) < length + PAGE:
            self._scratch = np.empty(length + PAGE, np.uint8)
        data: Any = like_in_file(self._scratch, start, length)
        self.nbytes += self._checked(piece, start, memoryview(data))
        return data

    def _checked(self, piece: Piece, start: int, into: Any) -> int:
        from xxhash import xxh3_64_hexdigest  # loaded where something is loaded: nothing else here needs it

        self._read(piece.file, start, into)
        if piece.digest and xxh3_64_hexdigest(into) != piece.digest:
            raise self._damaged(piece.file, "what lies in it is not what was written")
        return len(into)

    def _read(self, name: str, start: int, into: Any) -> None:
        path = f"{self._folder}/{name}"
        try:
            key = (name, threading.get_ident())  # a file that is open has one reader
            if key not in self._open:
                self._open[key] = self._stack.enter_context(_opened(path))
            with store_errors(path, "read"):
                count = self._open[key].read(start, into)
            if count < len(into):
                raise self._damaged(name, "it is shorter than what was written")
        except FileNotFoundError:
            raise self._damaged(name, "it is missing, or this rank's node does not see the path") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {advice(error)}") from error

    def _damaged(self, name: str, why: str) -> CheckpointCorrupted:
        path = f"{self._folder}/{name}"
        return CheckpointCorrupted(f"{path} is damaged: {why}; load another step (step=)", files=(path,))


def _fills(one: Fetch, target: torch.Tensor) -> bool:
    """Whether the whole piece goes, as it lies in its file, to memory that it can be read into."""
    box = one.piece.box
    whole = box is not None and one.piece.data >= 0 and one.sizes == box.sizes
    return whole and target.device.type == "cpu" and target.is_contiguous() and target.numel() > 1


class _Reader(Protocol):
    """A file that is open."""

    def read(self, start: int, into: memoryview) -> int:
        """As ``DiskReader.read``."""
        ...


@contextmanager
def _opened(path: str) -> Generator[_Reader]:
    if "://" not in path:
        with DiskReader(os.fspath(path)) as file:
            yield file
        return
    from fsspec.core import url_to_fs  # comes with torch; needed only for URLs

    files, at = url_to_fs(path)  # pyright: ignore[reportUnknownVariableType]
    with store_errors(path, "read"):
        stored = files.open(at, "rb")
    with stored as file:
        yield _Stored(file)


class _Stored:
    """A file of a store."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, start: int, into: memoryview) -> int:
        self._file.seek(start)
        done = 0
        while done < len(into) and (count := self._file.readinto(into[done:])):
            done += count
        return done
