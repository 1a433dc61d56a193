"""Memory for received, joined and selected rows: large, reused blocks of huge pages; copies on several threads.

Writing 256 MB into fresh memory is mostly page faults: with 4 KB pages it takes about three times as long as into
mapped memory, with 2 MB pages about twice, since the kernel clears each page at its first use. So large blocks request
transparent huge pages (``madvise(MADV_HUGEPAGE)``), and freed blocks are kept for later blocks of about their size.
Kernels without huge pages give ordinary memory.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import numpy as np

from phalanx.wire.value import Dims, Value, torch

Array = np.ndarray[Any, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

HUGE_FROM = 4 << 20
"""Minimum size in bytes of blocks of huge pages; for smaller blocks the allocator's own memory is as fast."""

PARALLEL_FROM = 8 << 20
"""Minimum size in bytes of copies that are divided over threads; for smaller ones waking threads costs more."""

_TORCH_PARALLEL_FROM = 1 << 15
"""Number of elements from which torch copies on several threads, which wait long if ranks keep all cores busy."""

_CHUNK = 4 << 20
_MOST_THREADS = 8
_HUGE_PAGE = 2 << 20
_SLACK = 1.25  # a kept region is reused for blocks that fill at least 1/1.25 of it
_SHARE_OF_MEMORY = 64  # a process keeps at most 1/64 of the machine's memory


def bytes_at(owner: Value, address: int, nbytes: int) -> Bytes:
    """Return the memory at ``address`` as a writable array that keeps ``owner`` alive.

    Not ``Tensor.numpy()``, after which the tensor could not be resized any more, nor ``torch.from_numpy``, which warns
    about read-only arrays.
    """
    if not nbytes:  # older NumPy refuses the address 0 of an empty tensor
        return np.empty(0, np.uint8)
    interface = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
    return np.asarray(SimpleNamespace(owner=owner, __array_interface__=interface))


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return the memory of a contiguous CPU tensor as a writable array of bytes."""
    return bytes_at(tensor, tensor.data_ptr(), tensor.numel() * tensor.element_size())


class _Region:
    """Private anonymous memory, aligned to a huge page."""

    __slots__ = ("_map", "address", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
        self._map = mmap.mmap(-1, self.nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.advise("MADV_HUGEPAGE")
        begin: int = np.frombuffer(self._map, dtype=np.uint8).__array_interface__["data"][0]
        self.address = -(-begin // _HUGE_PAGE) * _HUGE_PAGE

    def advise(self, advice: str) -> None:
        try:
            self._map.madvise(getattr(mmap, advice))
        except (OSError, AttributeError):  # an older kernel
            return


class BufferPool:
    """Unused regions, at most ``most`` bytes of them, kept for later blocks.

    The kernel may reclaim the pages of a kept region when memory is short (``MADV_FREE``, madvise(2)).
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # A deque, whose operations are atomic: blocks are freed on any thread, at any time.
        self._kept: deque[_Region] = deque()

    @property
    def kept_bytes(self) -> int:
        """Bytes of the kept regions."""
        return sum(region.nbytes for region in list(self._kept))

    def block(self, nbytes: int) -> Bytes:
        """Return ``nbytes`` of writable memory with arbitrary content, which returns to the pool after its last use."""
        region = self._take(nbytes) or _Region(nbytes)
        block = bytes_at(region, region.address, nbytes)
        weakref.finalize(block, self.give_back, region).atexit = False  # the process frees it
        return block

    def _take(self, nbytes: int) -> _Region | None:
        """Remove and return the most recently freed region of about that size, or None if there is none."""
        most = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE * _SLACK
        for region in reversed(list(self._kept)):
            if nbytes <= region.nbytes <= most:
                try:
                    self._kept.remove(region)
                except ValueError:  # another thread took it
                    continue
                return region
        return None

    def give_back(self, region: _Region) -> None:
        """Keep a region for later blocks. If the kept regions exceed the limit, free the oldest."""
        if region.nbytes > self._most:
            return
        region.advise("MADV_FREE")
        self._kept.append(region)
        while self.kept_bytes > self._most:
            try:
                self._kept.popleft()
            except IndexError:
                return


#: The buffer pool of this process.
buffer_pool = BufferPool(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _SHARE_OF_MEMORY)


def allocate(nbytes: int) -> torch.Tensor:
    """Return a new uint8 tensor on the CPU, with arbitrary content.

    From ``HUGE_FROM`` bytes on it uses huge pages, which are reused once the tensor is freed. Its storage cannot be
    resized then. ``.numpy()`` returns the same memory as an array.
    """
    if nbytes >= HUGE_FROM:
        return torch.from_numpy(buffer_pool.block(nbytes))
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def tensor_over(
    block: torch.Tensor, dtype: torch.dtype, shape: Dims, strides: Dims | None = None
) -> torch.Tensor:
    """Return a tensor over the memory of ``block`` that autograd does not treat as a view; strides None: contiguous."""
    offset = block.storage_offset() // dtype.itemsize
    place: list[Any] = [block.untyped_storage(), offset, shape, *([] if strides is None else [strides])]
    return torch.empty(0, dtype=dtype, device=block.device).set_(*place)


@functools.cache
def _copiers() -> ThreadPoolExecutor:
    """Return the thread pool for copies."""
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    return ThreadPoolExecutor(threads, thread_name_prefix="phalanx-copy")


os.register_at_fork(after_in_child=_copiers.cache_clear)


def _copy_all(targets: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
    """Copy each source into its target; large copies are divided into chunks for the thread pool.

    NumPy releases the GIL during each chunk. The first error is raised once all chunks are done.
    """
    pairs = list(zip(targets, sources, strict=True))
    if sum(target.nbytes for target in targets) < PARALLEL_FROM:
        for dst, src in pairs:
            dst[:] = src
        return
    pieces = [
        (dst[at : at + _CHUNK], src[at : at + _CHUNK])
        for dst, src in pairs
        for at in range(0, dst.nbytes, _CHUNK)
    ]
    running: list[Future[None]] = []
    try:
        running.extend(_copiers().submit(np.copyto, *piece) for piece in pieces)
    except RuntimeError as error:
        # Otherwise no thread could start: this chunk is queued, and may be copied later.
        if "shutdown" not in str(error):
            raise
        for piece in pieces[len(running) :]:  # the process exits: the pool accepts no work
            np.copyto(*piece)
    wait(running)
    for future in running:
        future.result()


def private_copies(views: Sequence[memoryview]) -> list[torch.Tensor]:
    """Copy each buffer into its own memory (`allocate`), in parallel if the buffers are large."""
    blocks = [allocate(view.nbytes) for view in views]
    _copy_all(list(map(bytes_of, blocks)), [np.frombuffer(view, np.uint8) for view in views])
    return blocks


def concat_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join at least one tensor along dim 0 into new memory, detached from any graph.

    Contiguous CPU tensors of equal dtype and row shape are copied directly, large ones in parallel into huge pages.
    Other tensors (small, other devices or layouts, subclasses, dtypes to be promoted) are passed to ``torch.cat``.

    Raises:
        RuntimeError: if the row shapes differ (from ``torch.cat``).
    """
    pieces = [tensor.detach() for tensor in tensors]
    sizes = [piece.numel() for piece in pieces]
    small = max(sizes) < _TORCH_PARALLEL_FROM and sum(sizes) * pieces[0].element_size() < HUGE_FROM
    if small or not _have_equal_rows(pieces, torch.Tensor) or not all(map(_is_plain, pieces)):
        return torch.cat(pieces)
    shape = (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])
    return tensor_over(_joined([bytes_of(piece) for piece in pieces]), pieces[0].dtype, shape)


def select_rows(tensor: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    """Return the rows of a tensor at ``indices``, in new memory and detached from any graph."""
    rows = tensor.detach()
    is_big = rows.numel() >= _TORCH_PARALLEL_FROM and _is_plain(rows) and rows.nbytes < PARALLEL_FROM
    if not is_big or min(indices, default=0) < 0 or max(indices, default=0) >= len(rows):
        places = torch.as_tensor(list(indices), dtype=torch.long, device=rows.device)
        # torch selects no single elements of these types
        if rows.ndim == 1 and rows.dtype in (torch.uint16, torch.uint32, torch.uint64):
            return rows[:, None].index_select(0, places)[:, 0]
        return rows.index_select(0, places)
    table, chosen = bytes_of(rows).reshape(len(rows), -1), np.array(indices, np.intp)
    block = allocate(len(chosen) * table.shape[1])
    np.take(table, chosen, axis=0, out=bytes_of(block).reshape(-1, table.shape[1]), mode="clip")
    return tensor_over(block, rows.dtype, (len(chosen), *rows.shape[1:]))


def concat_arrays(arrays: Sequence[Array]) -> Array:
    """Join at least one array along the first axis into new, writable memory.

    Large arrays in C order with equal dtype and row shape are copied directly into huge pages, in parallel. Other
    arrays are passed to ``numpy.concatenate``.

    Raises:
        ValueError: if the row shapes differ (from ``numpy.concatenate``).
    """
    dtype, total = arrays[0].dtype, sum(array.nbytes for array in arrays)
    plain = _have_equal_rows(arrays, np.ndarray) and all(array.flags.c_contiguous for array in arrays)
    if not plain or dtype.hasobject or total < PARALLEL_FROM:
        return np.concatenate(arrays)
    joined = _joined([array.reshape(-1).view(np.uint8) for array in arrays])
    return joined.numpy().view(dtype).reshape(-1, *arrays[0].shape[1:])


def _joined(parts: Sequence[Bytes]) -> torch.Tensor:
    """Return a new block with all parts in sequence."""
    ends = list(itertools.accumulate((part.nbytes for part in parts), initial=0))
    block = allocate(ends[-1])
    memory = bytes_of(block)
    _copy_all([memory[at:end] for at, end in itertools.pairwise(ends)], parts)
    return block


def _have_equal_rows(pieces: Sequence[Any], kind: type) -> bool:
    first = pieces[0]
    found = {(type(piece), piece.dtype, piece.ndim, piece.shape[1:]) for piece in pieces}
    return first.ndim > 0 and found == {(kind, first.dtype, first.ndim, first.shape[1:])}


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is fully described by dtype, shape and the contiguous bytes of its CPU memory."""
    kind = type(tensor), tensor.layout, tensor.device.type
    has_more = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor._is_zerotensor()
    return kind == (torch.Tensor, torch.strided, "cpu") and not has_more and tensor.is_contiguous()
