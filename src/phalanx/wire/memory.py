"""Memory for received data: large blocks from huge pages, used again; copies and joins on several threads.

Writing 256 MB into fresh memory is mostly page faults: with 4 KB pages it takes about three times as long as
into memory that is there already, with 2 MB pages about twice. So large blocks ask the kernel for huge pages
(transparent ones, ``madvise(MADV_HUGEPAGE)``) and are kept for the next of their size (`phalanx.wire.buffer_pool`);
where there is no such thing they are plain memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx.wire import buffer_pool as recycle
from phalanx.wire.lazy import is_tensor, lazy
from phalanx.wire.value import Value

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

__all__ = [
    "HUGE_FROM",
    "PARALLEL_FROM",
    "allocate",
    "bytes_at",
    "bytes_of",
    "concat_arrays",
    "concat_rows",
    "copy_all",
    "copy_into",
    "private_copies",
    "tensor_over",
]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

HUGE_FROM = 4 << 20
"""Blocks from this many bytes on are made of huge pages; below, the allocator's own memory is as fast."""

PARALLEL_FROM = 8 << 20
"""Copies from this many bytes on are divided over threads; below, waking them costs more than it saves."""

_CHUNK = 4 << 20
_MOST_THREADS = 8


def allocate(nbytes: int) -> torch.Tensor:
    """A new uint8 tensor of ``nbytes`` bytes with arbitrary content, on the CPU.

    From ``HUGE_FROM`` bytes on it is backed by huge pages, which are used again once its last user is gone; its
    storage cannot be resized then, as that of a tensor made from an array cannot. ``.numpy()`` gives the same
    memory as an array.
    """
    if nbytes >= HUGE_FROM and recycle.pool is not None:
        return torch.from_numpy(recycle.pool.block(nbytes))
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class _Owned:
    """Memory of ``owner`` in the form in which NumPy takes it."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, owner: Value, address: int, nbytes: int) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def bytes_at(owner: Value, address: int, nbytes: int) -> Bytes:
    """The memory at ``address`` as a writable array that keeps ``owner`` alive.

    Used instead of ``Tensor.numpy()``, which forbids the tensor to be resized from then on, and instead of
    ``torch.from_numpy`` on read-only memory, which warns.
    """
    return np.asarray(_Owned(owner, address, nbytes))


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The memory of a contiguous CPU tensor."""
    return bytes_at(tensor, tensor.data_ptr(), tensor.numel() * tensor.element_size())


def tensor_over(
    block: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...] | None = None
) -> torch.Tensor:
    """A tensor on the memory of ``block`` that is no view of it to autograd; strides None: contiguous."""
    offset = block.storage_offset() // dtype.itemsize
    place: list[Any] = [block.untyped_storage(), offset, shape, *([] if strides is None else [strides])]
    return torch.empty(0, dtype=dtype, device=block.device).set_(*place)


class _Copiers:
    """The threads that copy, started when first needed, anew in a forked child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self.count = 1

    def pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self.count = min(_MOST_THREADS, _usable_cores())
                self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="phalanx-copy")
            return self._pool


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


_copiers = _Copiers()


def _renew_copiers() -> None:
    global _copiers
    _copiers = _Copiers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_copiers)


def _run_all(jobs: Sequence[Callable[[], None]]) -> None:
    """Run the jobs on the copying threads and return when all are done; the first error is raised then."""
    if len(jobs) == 1:
        jobs[0]()
        return
    pool = _copiers.pool()
    running: list[Future[None]] = [pool.submit(job) for job in jobs]
    errors = [future.exception() for future in running]
    for error in errors:
        if error is not None:
            raise error


def _byte_jobs(dst: Bytes, src: Bytes) -> list[Callable[[], None]]:
    """Copies of pieces of ``_CHUNK`` bytes; NumPy gives up the interpreter lock in each."""

    def piece(start: int) -> Callable[[], None]:
        return lambda: np.copyto(dst[start : start + _CHUNK], src[start : start + _CHUNK])

    return [piece(start) for start in range(0, dst.nbytes, _CHUNK)]


def copy_into(dst: Value, src: Value) -> None:
    """Copy the bytes of ``src`` to ``dst``: one-dimensional uint8 tensors, arrays or buffers of equal length.

    Large copies are divided over threads (``PARALLEL_FROM``).

    Raises:
        ValueError: the lengths differ.
    """
    to, of = _as_bytes(dst), _as_bytes(src)
    if to.nbytes != of.nbytes:
        raise ValueError(
            f"copy_into: {of.nbytes} bytes given for a destination of {to.nbytes}; expected as many"
        )
    if to.nbytes < PARALLEL_FROM:
        np.copyto(to, of)
    else:
        _run_all(_byte_jobs(to, of))


def copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair to the first, of the same shape, casting it where types differ.

    What is large is divided over threads.
    """
    jobs: list[Callable[[], None]] = []
    small: list[tuple[torch.Tensor, torch.Tensor]] = []
    held = 0
    for dst, src in pairs:
        if src.device.type != "cpu" or dst.device.type != "cpu":
            dst.copy_(src.detach())  # in the order of this thread's stream
        elif dst.nbytes >= _CHUNK and dst.dtype == src.dtype and dst.is_contiguous():
            jobs += _row_jobs(dst, src.detach())
        else:
            small.append((dst, src.detach()))
            held += dst.nbytes
            if held >= _CHUNK:
                jobs.append(_copies(small))
                small, held = [], 0
    if small:
        jobs.append(_copies(small))
    if jobs:
        _run_all(jobs)


def _copies(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
    def copy() -> None:
        for dst, src in pairs:
            dst.copy_(src)

    return copy


def private_copies(views: Sequence[memoryview]) -> list[torch.Tensor]:
    """A copy of each buffer in memory of its own (`allocate`), in parallel where they are large."""
    if sum(view.nbytes for view in views) < PARALLEL_FROM:
        return [_private_copy(view) for view in views]
    blocks = [allocate(view.nbytes) for view in views]
    pairs = zip(blocks, views, strict=True)
    _run_all([job for block, view in pairs for job in _byte_jobs(bytes_of(block), _as_bytes(view))])
    return blocks


def _private_copy(view: memoryview) -> torch.Tensor:
    block = allocate(view.nbytes)
    bytes_of(block)[:] = view
    return block


def _as_bytes(buffer: Value) -> Bytes:
    if is_tensor(buffer):
        return bytes_of(buffer)
    if isinstance(buffer, np.ndarray):
        return buffer
    return np.frombuffer(buffer, dtype=np.uint8)


def concat_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors joined along dim 0, in new memory that none of them shares, detached from any graph.

    Plain CPU tensors of one dtype and one row shape are copied straight into huge pages, in parallel where
    large. All else (other devices or layouts, subclasses, dtypes to be promoted) goes to ``torch.cat``.

    Raises:
        ValueError: there are no tensors.
        RuntimeError: the row shapes differ (from ``torch.cat``).
    """
    if not tensors:
        raise ValueError("concat_rows: no tensors given; expected one at least, for dtype and row shape")
    pieces = [tensor.detach() for tensor in tensors]
    if not _joins_plainly(pieces):  # such as sparse ones, which have no nbytes
        return torch.cat(pieces)
    total = sum(piece.nbytes for piece in pieces)
    if total < HUGE_FROM:
        return torch.cat(pieces)
    first = pieces[0]
    shape = (sum(piece.shape[0] for piece in pieces), *first.shape[1:])
    out = tensor_over(allocate(total), first.dtype, shape)
    jobs: list[Callable[[], None]] = []
    row = 0
    for piece in pieces:
        jobs += _row_jobs(out[row : row + piece.shape[0]], piece)
        row += piece.shape[0]
    _run_all(jobs)
    return out


def _joins_plainly(pieces: Sequence[torch.Tensor]) -> bool:
    first = pieces[0]
    return first.dim() > 0 and all(
        type(piece) is torch.Tensor
        and piece.layout is torch.strided
        and piece.device.type == "cpu"
        and piece.dtype == first.dtype
        and piece.dim() == first.dim()
        and piece.shape[1:] == first.shape[1:]
        for piece in pieces
    )


def _row_jobs(dst: torch.Tensor, src: torch.Tensor) -> list[Callable[[], None]]:
    if src.is_contiguous() and not src.is_conj() and not src.is_neg():
        return _byte_jobs(bytes_of(dst), bytes_of(src))

    def copy() -> None:
        dst.copy_(src)

    return [copy]


def concat_arrays(arrays: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The arrays joined along their first axis, in new writable memory that none of them shares.

    Plain arrays of one dtype and one row shape are copied straight into huge pages, in parallel, where large;
    everything else goes to ``numpy.concatenate``.

    Raises:
        ValueError: there are no arrays, or their row shapes differ (from ``numpy.concatenate``).
    """
    if not arrays:
        raise ValueError("concat_arrays: no arrays given; expected one at least, for dtype and row shape")
    first = arrays[0]
    plain = first.ndim > 0 and all(
        type(array) is np.ndarray
        and array.dtype == first.dtype
        and array.shape[1:] == first.shape[1:]
        and array.ndim == first.ndim
        for array in arrays
    )
    if not plain or first.dtype.hasobject or sum(array.nbytes for array in arrays) < PARALLEL_FROM:
        return np.concatenate(arrays)
    shape = (sum(len(array) for array in arrays), *first.shape[1:])
    out = allocate(sum(array.nbytes for array in arrays)).numpy().view(first.dtype).reshape(shape)
    jobs: list[Callable[[], None]] = []
    row = 0
    for array in arrays:
        jobs += _array_jobs(out[row : row + len(array)], array)
        row += len(array)
    _run_all(jobs)
    return out


def _array_jobs(dst: np.ndarray[Any, Any], src: np.ndarray[Any, Any]) -> list[Callable[[], None]]:
    if src.flags.c_contiguous:
        return _byte_jobs(dst.reshape(-1).view(np.uint8), src.reshape(-1).view(np.uint8))
    return [lambda: np.copyto(dst, src)]
