"""A stream of named tensors, of which neither names nor number are known before, as windows of at most some bytes.

A window travels as one bucket, and its table as the bucket's note: the reader needs to know nothing but its number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from phalanx.errors import InternalError, WeightsLost
from phalanx.movers.packing import PLAIN
from phalanx.transfer.buckets import ALIGNMENT, Bucket, Slot
from phalanx.transfer.tensors import dtype_named, name_of
from phalanx.wire.memory import allocate

__all__ = ["Gathering", "Joining", "Part", "Whole", "Window", "read_table", "unwanted"]


class Part(NamedTuple):
    """``count`` elements of the tensor ``name`` from element ``start`` on, at byte ``offset`` of the window."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    count: int
    offset: int


@dataclass(frozen=True)
class Window:
    """Parts of tensors, in the order in which they came, with their elements as flat views.

    ``last``: nothing comes after it. ``step``: of the trainer, where it says so.
    """

    number: int
    parts: tuple[Part, ...]
    elements: tuple[torch.Tensor, ...]
    nbytes: int
    last: bool = False
    step: int | None = None

    def bucket(self, source: int, readers: Sequence[int]) -> Bucket:
        """What the source sends to these readers."""
        slots = tuple(_slot(turn, part, readers) for turn, part in enumerate(self.parts))
        return Bucket(source, self.number, self.nbytes, tuple(readers), slots)

    def read(self, slot: Slot) -> torch.Tensor:
        """The elements of one of the bucket's slots."""
        return self.elements[slot.source_at[0]]

    def table(self) -> bytes:
        """What a reader needs to know of it."""
        return json.dumps({"parts": self.parts, "last": self.last, "step": self.step}).encode()


def _slot(turn: int, part: Part, readers: Sequence[int]) -> Slot:
    nbytes = part.count * dtype_named(part.dtype).itemsize
    targets = tuple(readers)
    return Slot(part.offset, nbytes, part.dtype, (part.count,), part.name, (turn,), part.name, (0,), targets)


def read_table(note: bytes) -> tuple[list[Part], bool, int | None]:
    """Parts, whether the window is the last one, and the trainer's step."""
    found = json.loads(note)
    parts = [Part(name, dtype, tuple(shape), *rest) for name, dtype, shape, *rest in found["parts"]]
    return parts, found["last"], found["step"]


@dataclass
class Gathering:
    """Makes windows of ``limit`` bytes at most; tensors that are larger are divided.

    Floating-point tensors travel as ``dtype`` where one is given. A window holds the tensors that it was given until it
    is sent.
    """

    limit: int
    dtype: torch.dtype | None = None
    step: int | None = None
    tensors: int = 0
    nbytes: int = 0
    _number: int = 0
    _end: int = 0
    _parts: list[Part] = field(default_factory=list[Part])
    _elements: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    def add(self, name: str, tensor: torch.Tensor) -> Iterator[Window]:
        """Take a tensor; gives the windows that are full."""
        given = tensor.detach()
        if self.dtype is not None and given.is_floating_point():
            given = given.to(self.dtype)
        flat, size = given.reshape(-1), given.element_size()
        self.tensors += 1
        self.nbytes += flat.numel() * size
        most = max(self.limit // size, 1)
        for start in range(0, flat.numel() or 1, most):
            piece = flat[start : start + most]
            if self._parts and self._offset() + piece.numel() * size > self.limit:
                yield self._close(last=False)
            offset = self._offset()
            shape = tuple(given.shape)
            self._parts.append(Part(name, name_of(given.dtype), shape, start, piece.numel(), offset))
            self._elements.append(piece)
            self._end = offset + piece.numel() * size

    def finish(self) -> Window:
        """The last window; empty where nothing is left."""
        return self._close(last=True)

    def _offset(self) -> int:
        return -(-self._end // ALIGNMENT) * ALIGNMENT

    def _close(self, *, last: bool) -> Window:
        made = Window(self._number, tuple(self._parts), tuple(self._elements), self._end, last, self.step)
        self._number, self._end, self._parts, self._elements = self._number + 1, 0, [], []
        return made


class Whole:
    """How a reader unpacks a window: as it is, into memory of its own, so that the source can go on at once."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    def room(self, bucket: Bucket) -> int:
        """See :class:`phalanx.movers.packing.Packing`."""
        return PLAIN.room(bucket)

    def pack(self, memory: torch.Tensor, bucket: Bucket, read: Any) -> int:
        """See :class:`phalanx.movers.packing.Packing`."""
        return PLAIN.pack(memory, bucket, read)

    def unpack(self, memory: torch.Tensor, slots: Sequence[Slot], write: Any) -> int:
        """See :class:`phalanx.movers.packing.Packing`."""
        self.memory = allocate(memory.numel()).copy_(memory)
        return memory.numel()


def unwanted(slot: Slot) -> torch.Tensor:
    """What `Whole` never asks for."""
    raise InternalError(f"a window is unpacked whole, and {slot} was asked for alone")


@dataclass
class Joining:
    """Makes tensors of the parts of windows; those that came whole are views of the window's memory."""

    _name: str = ""
    _tensor: torch.Tensor | None = None
    _missing: int = 0

    def tensors(self, parts: Sequence[Part], memory: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are complete with this window, in their order."""
        for part in parts:
            dtype = dtype_named(part.dtype)
            elements = memory[part.offset : part.offset + part.count * dtype.itemsize].view(dtype)
            if elements.numel() == _elements(part.shape):
                yield part.name, elements.view(part.shape)
            elif (joined := self._join(part, elements)) is not None:
                yield part.name, joined

    def _join(self, part: Part, elements: torch.Tensor) -> torch.Tensor | None:
        if self._tensor is None:
            total = _elements(part.shape)
            self._name, self._missing = part.name, total
            self._tensor = allocate(total * elements.element_size()).view(elements.dtype)
        self._tensor[part.start : part.start + part.count].copy_(elements)
        self._missing -= part.count
        if self._missing:
            return None
        joined, self._tensor = self._tensor.view(part.shape), None
        return joined

    def finish(self) -> None:
        """Nothing may be missing. Raises WeightsLost."""
        if self._tensor is not None:
            raise WeightsLost(f"the weights ended {self._missing} elements before the end of {self._name!r}")


def _elements(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
