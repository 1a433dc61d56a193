"""A rank's file: items one after another, each as ``torch.save`` writes it, with digests of what was written.

Torch's distributed checkpoint reads such files by the ``.metadata`` beside them.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from phalanx.checkpoint.storage.manifest import FileFacts
from phalanx.checkpoint.storage.storage import advice, store_errors
from phalanx.checkpoint.storage.write_plan import Written
from phalanx.checkpoint.worker.disk import PAGE, DiskFile
from phalanx.errors import CheckpointError

__all__ = ["elements_of", "pickled", "write_file"]

_BLOCK = 8 << 20
"""What is written at once."""
_DIGESTED = 512 << 10
"""What is digested at once: the second digest finds it in the processor's cache, where the step has most of its own."""
_crc = threading.Lock()
"""Around torch's process-wide choice of checksums: ours are better, and ten times faster."""


class _Form(NamedTuple):
    """What ``torch.save`` writes around the elements of a tensor of one type and shape."""

    before: bytes
    after: bytes


def pickled(value: Any) -> bytes:
    """A value as torch's distributed checkpoint keeps it."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def write_file(path: str, items: Iterable[torch.Tensor | bytes]) -> tuple[list[Written], FileFacts]:
    """Write a file, and return once it will be there after a loss of power.

    Args:
        path: an absolute path, or a URL that fsspec knows. Its folder is there already.
        items: tensors, and values as :func:`pickled` gives them.

    Raises:
        CheckpointError: it cannot be written; says why.
    """
    try:
        with _opened(path) as file:
            sink = _Sink(file)
            written = [sink.add(item) for item in items]
            file.finish()
        return written, FileFacts(sink.at, sink.digest())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} cannot be written from this rank's node: its folder, which the driver made, is not there; choose "
            "a path that the driver and all ranks share"
        ) from error
    except OSError as error:
        with suppress(OSError):  # what is left of it takes the room of what is to be told
            if "://" not in path:
                os.unlink(path)
        raise CheckpointError(f"{path} cannot be written: {advice(error)}") from error


class _File(Protocol):
    """Where a sink writes to."""

    def gap(self, data: memoryview, ahead: int) -> int:
        """As ``DiskFile.gap``."""
        ...

    def write(self, data: Any) -> None:
        """Write all of it."""
        ...

    def finish(self) -> None:
        """Return when all is on the disk."""
        ...


@contextmanager
def _opened(path: str) -> Generator[_File]:
    if "://" not in path:
        with DiskFile(path) as file:
            yield file
        return
    from fsspec.core import url_to_fs  # comes with torch; needed only for URLs

    files, at = url_to_fs(path)  # pyright: ignore[reportUnknownVariableType]
    with store_errors(path, "written"):
        file = files.open(at, "wb")
    try:
        yield _Stored(file, path)
    finally:
        with store_errors(path, "written"):
            file.close()


class _Stored:
    """A file of a store, which has what it was given when it is closed."""

    def __init__(self, file: Any, path: str) -> None:
        self._file, self._path = file, path

    def write(self, data: Any) -> None:
        with store_errors(self._path, "written"):
            self._file.write(data)

    def finish(self) -> None:
        with store_errors(self._path, "written"):
            self._file.flush()

    def gap(self, data: memoryview, ahead: int) -> int:
        return 0


class _Sink:
    """Writes items, digests what it writes, and knows where it is."""

    def __init__(self, file: Any) -> None:
        from xxhash import xxh3_128  # loaded where something is saved: nothing else here needs it

        self._file = file
        self._all: Any = xxh3_128()
        self._forms: dict[tuple[torch.dtype, torch.Size], _Form | None] = {}
        self.at = 0

    def digest(self) -> str:
        """Of all that was written."""
        return self._all.hexdigest()

    def add(self, item: torch.Tensor | bytes) -> Written:
        """Write one item."""
        begin = self.at
        if isinstance(item, bytes):
            self._write(item)
            return Written(begin, len(item), -1, _digest(item))
        tensor = _alone(item)
        key = (tensor.dtype, tensor.shape)
        if key not in self._forms:
            self._forms[key] = _form_of(tensor)
        form = self._forms[key]
        if form is None:
            return self.add(pickled(tensor))
        elements = _elements(tensor)
        gap = self._file.gap(elements, len(form.before))
        self._write(bytes(gap))
        begin = self.at
        self._write(form.before)
        digest = self._write_elements(elements)
        self._write(form.after)
        return Written(begin, self.at - begin, begin + len(form.before), digest)

    def _write_elements(self, data: memoryview) -> str:
        """The digest of what was written."""
        from xxhash import xxh3_64  # loaded where something is saved: nothing else here needs it

        digest: Any = xxh3_64()
        while data:
            block = data[: _BLOCK - self.at % PAGE]
            self._file.write(block)
            for start in range(0, len(block), _DIGESTED):
                piece = block[start : start + _DIGESTED]
                self._all.update(piece)
                digest.update(piece)
            self.at += len(block)
            data = data[len(block) :]
        return digest.hexdigest()

    def _write(self, data: Any) -> None:
        self._file.write(data)
        self._all.update(data)
        self.at += len(data)


class _Listener:
    """A stream that keeps what is written before and after the elements of a tensor, and not those."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.before, self.after, self.found = bytearray(), bytearray(), False
        self._address, self._nbytes = address, nbytes

    def write(self, data: Any) -> int:
        if len(data) == self._nbytes and np.frombuffer(data, np.uint8).ctypes.data == self._address:
            self.found = True
        else:
            (self.after if self.found else self.before).extend(data)
        return len(data)

    def flush(self) -> None:
        pass


def _form_of(tensor: torch.Tensor) -> _Form | None:
    """None where torch writes the elements in another way."""
    if tensor.numel() == 0:
        return None
    listener = _Listener(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    with _crc:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(tensor, listener)  # pyright: ignore[reportArgumentType]
        finally:
            torch.serialization.set_crc32_options(before)
    return _Form(bytes(listener.before), bytes(listener.after)) if listener.found else None


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """In host memory, contiguous, and in a storage of its own, for ``torch.save`` writes whole storages."""
    flat = tensor.detach().cpu().contiguous()
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    if flat.numel() == 0 or flat.untyped_storage().nbytes() == flat.numel() * flat.element_size():
        return flat
    return torch.frombuffer(_elements(flat), dtype=flat.dtype).view(flat.shape)


def _elements(tensor: torch.Tensor) -> Any:
    """The bytes of a contiguous tensor of host memory, without a copy."""
    flat = tensor.reshape(-1)
    if flat.stride(0) != 1:  # a single element keeps the stride of what it was cut from
        flat = flat.clone(memory_format=torch.contiguous_format)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def elements_of(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor, row-major, in host memory; without a copy where they lie so."""
    return _elements(tensor.detach().cpu().contiguous()) if tensor.numel() else memoryview(b"")


def _digest(data: Any) -> str:
    from xxhash import xxh3_64_hexdigest  # loaded where something is saved: nothing else here needs it

    return xxh3_64_hexdigest(data)
