"""The physical floor: the necessary copies only, by plain memcpy, in one process and without a library.

The shared memory is one that has been written before (an object store reuses its pages), the private memory
is fresh and asks for huge pages, and a copy uses all cores. So the floor is low on purpose.

* broadcast to N: batch -> shared memory once; shared -> N private tensors, each touched.
* split and gather over N: batch -> shared; shared -> N private pieces, each touched; pieces -> shared;
  shared -> one private result. Four times the batch.
* chain A -> B -> C: A's rows -> shared; shared -> B's private rows, touched; B's rows -> shared. C may read
  where the rows lie. Three times the batch.
"""

from __future__ import annotations

import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from bench.contenders.base import Contender, Shard, cpu_count, touch
from bench.contenders.saves import DiskRoles
from bench.contenders.weights import (
    COLUMNS,
    LAYOUTS,
    ROWS,
    WeightsRoles,
    is_at,
    names,
    target_tensors,
    train,
)

MADV_HUGEPAGE = 14
HUGE_PAGE_FROM = 4 << 20


def fresh_like(source: torch.Tensor) -> torch.Tensor:
    """Return private memory of the same shape, in huge pages from 4 MB on if the system has them."""
    made = torch.empty_like(source, memory_format=torch.contiguous_format)
    size = made.numel() * made.element_size()
    if size >= HUGE_PAGE_FROM:
        start = -(-made.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (made.data_ptr() + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_HUGEPAGE)
    return made


class SharedMemory:
    """Anonymous shared pages, written once before any clock runs."""

    def __init__(self) -> None:
        self._regions: dict[str, torch.Tensor] = {}

    def like(self, name: str, source: torch.Tensor) -> torch.Tensor:
        """Return the region of that name, with the shape of the source."""
        size = source.numel() * source.element_size()
        region = self._regions.get(name)
        if region is None or region.numel() < size:
            region = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).zero_()
            self._regions[name] = region
        return region[:size].view(source.dtype).view(source.shape)


def copied_out(source: torch.Tensor) -> torch.Tensor:
    """Return a copy in fresh private memory."""
    return fresh_like(source).copy_(source)


class FloorRoles(WeightsRoles):
    """Weights: the targets' parts -> shared memory; shared -> private memory of a target, which it reuses.

    Bytes that several targets need are written once. Cores share the tensors.
    """

    def __init__(self, layout: str, megabytes: int) -> None:
        super().__init__(layout, megabytes)
        chosen = LAYOUTS[layout]
        self._names = names(megabytes)
        self._whole = {name: torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16) for name in self._names}
        self._shared = {name: torch.zeros_like(tensor) for name, tensor in self._whole.items()}
        self._targets = [target_tensors(layout, megabytes, rank) for rank in range(chosen.targets)]
        self._threads = ThreadPoolExecutor(cpu_count())

    def train(self, step: int) -> None:
        train(self._whole, step)

    def sync(self, verify: str) -> None:
        list(self._threads.map(self._move, range(len(self._names))))

    def _move(self, index: int) -> None:
        name = self._names[index]
        self._shared[name].copy_(self._whole[name])
        for rank, target in enumerate(self._targets):
            target[name].copy_(LAYOUTS[self.layout].wanted(rank, index).of(self._shared[name]))

    def is_at(self, step: int) -> bool:
        return all(is_at(target, step) for target in self._targets)

    def close(self) -> None:
        self._threads.shutdown()


class Floor(Contender):
    """A group is its number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._shared = SharedMemory()
        self._shard = Shard()

    def do_connect(self) -> dict[str, str]:
        torch.set_num_threads(cpu_count())
        return {"torch": torch.__version__}

    def do_open(self, group: str, ranks: int) -> float:
        self._groups[group] = ranks
        return 0.0

    def do_close(self, group: str) -> None:
        del self._groups[group]

    def do_broadcast(self, group: str, megabytes: int) -> float:
        self._shared.like("down", self._batch(megabytes))
        return super().do_broadcast(group, megabytes)

    def do_split_gather(self, group: str, megabytes: int) -> float:
        self._shared.like("down", self._batch(megabytes))
        self._shared.like("up", self._batch(megabytes))
        return super().do_split_gather(group, megabytes)

    def do_chain(self, groups: list[str], megabytes: int) -> float:
        rows = self._shard.take(self._batch(megabytes).shape[0])
        self._shared.like("down", rows)
        self._shared.like("up", rows)
        return super().do_chain(groups, megabytes)

    def weights(self, layout: str, megabytes: int) -> FloorRoles:
        return FloorRoles(layout, megabytes)

    def saves(self, megabytes: int) -> DiskRoles:
        return DiskRoles(megabytes)

    def wrap(self, batch: torch.Tensor) -> torch.Tensor:
        return batch

    def broadcast(self, group: int, batch: torch.Tensor) -> list[float]:
        stored = self._shared.like("down", batch).copy_(batch)
        return [touch(copied_out(stored)) for _ in range(group)]

    def split_gather(self, group: int, batch: torch.Tensor) -> torch.Tensor:
        stored = self._shared.like("down", batch).copy_(batch)
        returned = self._shared.like("up", batch)
        for piece, place in zip(stored.tensor_split(group), returned.tensor_split(group), strict=True):
            mine = copied_out(piece)
            touch(mine)
            place.copy_(mine)
        return copied_out(returned)

    def chain(self, groups: list[int], rows: int) -> list[float]:
        stored = self._shared.like("down", self._shard.take(rows)).copy_(self._shard.take(rows))
        returned = self._shared.like("up", stored)
        for piece, place in zip(
            stored.tensor_split(groups[1]), returned.tensor_split(groups[1]), strict=True
        ):
            mine = copied_out(piece)
            touch(mine)
            place.copy_(mine)
        return [float(piece[:, 0].mean()) for piece in returned.tensor_split(groups[2])]

    def spawn(self, ranks: int) -> Any:
        raise NotImplementedError("the floor has no workers")

    def kill(self, group: Any) -> None:
        raise NotImplementedError("the floor has no workers")

    def trim(self, group: Any) -> None:
        """Do nothing: there are no workers."""

    def pids(self, group: Any) -> list[int]:
        return []

    def ping(self, group: Any) -> Any:
        raise NotImplementedError("the floor has no calls")

    def pipeline(self, group: Any, calls: int) -> None:
        raise NotImplementedError("the floor has no calls")


CONTENDER = Floor
