"""Tensors and arrays from their description and bytes: the receiving side.

The functions here stand in encoded streams by name: renaming one breaks what was encoded before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx.errors import InternalError
from phalanx.wire.decode_options import DecodeOptions, Policy, current_arrival
from phalanx.wire.lazy import lazy
from phalanx.wire.memory import HUGE_FROM, allocate, bytes_at, private_copies, tensor_over
from phalanx.wire.value import Value

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")
torch_utils: Any = lazy("torch._utils")

__all__ = ["Frame", "array", "open_frame", "parameter", "set_state", "subclass", "tensor", "token"]

REQUIRES_GRAD = 1
ON_ACCELERATOR = 2

ALIGNMENT = 16  # bytes; the widest element (complex128) wants no more


class Frame:
    """The buffers and tokens of one value while it is decoded, each buffer turned into memory once."""

    def __init__(
        self, buffers: Sequence[Any], tokens: Sequence[Any], policy: Policy | None, arrival: DecodeOptions
    ) -> None:
        self._views = [memoryview(buffer).toreadonly() for buffer in buffers]
        self._tokens = tokens
        self._private = arrival.policy_for(policy) is Policy.PRIVATE
        self._restore = arrival.restore
        self._blocks: dict[Place, torch.Tensor] = {}
        self._arrays: dict[Place, bytearray] = {}
        self._windows: dict[int, torch.Tensor] = {}
        self._as_type: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._on_device: dict[Place, torch.Tensor] = {}
        self._objects: dict[int, Any] = {}
        if self._private and arrival.device is None and len(buffers) > 1:
            self._blocks = dict(enumerate(private_copies(self._views)))

    def block(self, place: Place, nbytes: int, device: torch.device | None = None) -> torch.Tensor:
        """A tensor of any type over the bytes at ``place``: private memory, a view, or a copy on ``device``."""
        if device is not None:
            if place not in self._on_device:
                self._on_device[place] = self._window(place, nbytes).to(device)
            return self._on_device[place]
        if place not in self._blocks:
            self._blocks[place] = (
                self._copied(place, nbytes) if self._private else self._window(place, nbytes)
            )
        return self._blocks[place]

    def _copied(self, place: Place, nbytes: int) -> torch.Tensor:
        if place in self._arrays:  # an array has these bytes already
            return torch.frombuffer(self._arrays[place], dtype=torch.uint8)
        if isinstance(place, int):
            return private_copies([self._views[place]])[0]
        return self._window(place, nbytes).clone()

    def _window(self, place: Place, nbytes: int) -> torch.Tensor:
        if isinstance(place, int):
            return _window(self._views[place])
        index, offset = place
        if index not in self._windows:
            self._windows[index] = _window(self._views[index])
        return self._windows[index][offset : offset + nbytes]

    def tensor(
        self,
        place: Place,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        device: torch.device | None,
    ) -> torch.Tensor:
        """The bytes at ``place`` as a tensor."""
        alone = self._private and device is None and place not in self._blocks and place not in self._arrays
        if alone and isinstance(place, tuple) and dtype in _copied_as_they_are():
            whole, start = self._typed(place[0], dtype), place[1] // dtype.itemsize
            self._blocks[place] = whole.as_strided(shape, strides or _contiguous(shape), start).clone()
            return self._blocks[place]
        nbytes = math.prod(shape) * dtype.itemsize
        if alone and isinstance(place, int) and nbytes < HUGE_FROM:
            self._blocks[place] = _copied(self._views[place], dtype, shape, strides)
            return self._blocks[place]
        return tensor_over(self.block(place, nbytes, device), dtype, shape, strides)

    def _typed(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """All small bytes in a buffer as numbers of one type."""
        if (index, dtype) not in self._as_type:
            nbytes = self._views[index].nbytes
            whole = self._window((index, 0), nbytes - nbytes % dtype.itemsize)
            self._as_type[index, dtype] = whole.view(dtype)
        return self._as_type[index, dtype]

    def array_buffer(self, place: Place, nbytes: int = 0) -> Value:
        """The bytes at ``place`` as what arrays and other types take: writable exactly where it is private."""
        index, start = (place, 0) if isinstance(place, int) else place
        size = self._views[index].nbytes if isinstance(place, int) else nbytes
        if not self._private:
            return self._whole(index)[start : start + size]
        # A tensor has these bytes already, or huge pages are to.
        if place in self._blocks or size >= HUGE_FROM:
            return self._private_bytes(place, size).numpy()
        if place not in self._arrays:
            self._arrays[place] = bytearray(self._views[index][start : start + size])
        return self._arrays[place]

    def _private_bytes(self, place: Place, nbytes: int) -> torch.Tensor:
        block = self.block(place, nbytes)
        if block.dtype is torch.uint8 and block.dim() == 1:
            return block
        return tensor_over(block, torch.uint8, (nbytes,))

    def _whole(self, index: int) -> memoryview:
        return _aligned(self._views[index]).data.toreadonly()

    def token(self, index: int) -> Value:
        """The object for hoisted token ``index``, restored once."""
        if index not in self._objects:
            given = self._tokens[index]
            self._objects[index] = given if self._restore is None else self._restore(given)
        return self._objects[index]


Place = int | tuple[int, int]
"""Where bytes are: a buffer's number, or a buffer's number and an offset in it; -1 for no bytes."""

open_frame: ContextVar[Frame | None] = ContextVar("phalanx_open_frame", default=None)


def _frame() -> Frame:
    frame = open_frame.get()
    if frame is None:
        raise InternalError(
            "a part of an encoded value was unpickled by itself; decode() takes the whole value"
        )
    return frame


def _aligned(view: memoryview) -> np.ndarray[Any, Any]:
    """The bytes without a copy; a copy only where they start at an address that no element may have."""
    found = np.frombuffer(view, dtype=np.uint8)
    if found.__array_interface__["data"][0] % ALIGNMENT:
        block = allocate(found.nbytes).numpy()
        block[:] = found
        return block
    return found


@functools.cache
def _copied_as_they_are() -> frozenset[torch.dtype]:
    """The dtypes that torch can copy; the bytes of others are copied."""
    floats = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)
    return frozenset({*floats, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})


def _copied(
    view: memoryview, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...] | None
) -> torch.Tensor:
    """A dense tensor of its own with these bytes; quicker than one over a block of bytes."""
    made = torch.empty_strided(
        shape, _contiguous(shape) if strides is None else strides, dtype=dtype, device="cpu"
    )
    bytes_at(made, made.data_ptr(), view.nbytes)[:] = view
    return made


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) < 2:
        return (1,) * len(shape)
    return (*(math.prod(shape[dim + 1 :]) for dim in range(len(shape) - 1)), 1)


def _window(view: memoryview) -> torch.Tensor:
    """The bytes as a tensor without a copy; torch has no read-only ones."""
    memory = _aligned(view)
    return torch.from_numpy(bytes_at(memory, memory.__array_interface__["data"][0], memory.nbytes))


def tensor(
    place: Place, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...] | None, flags: int
) -> torch.Tensor:
    """A tensor over the bytes at ``place``, with ``strides`` in elements (None: contiguous)."""
    made = _over_block(place, getattr(torch, dtype), shape, strides, _target(flags))
    return made.requires_grad_() if flags & REQUIRES_GRAD else made


def _target(flags: int) -> torch.device | None:
    arrival = current_arrival()
    if arrival.device is None or not (arrival.every_tensor or flags & ON_ACCELERATOR):
        return None
    device = torch.device(arrival.device)
    return None if device.type == "cpu" else device


def _over_block(
    place: Place,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    device: torch.device | None,
) -> torch.Tensor:
    if place == -1:
        return torch.empty_strided(shape, strides or (), dtype=dtype, device=device or "cpu")
    return _frame().tensor(place, dtype, shape, strides, device)


def parameter(
    place: Place, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...] | None, flags: int
) -> torch.nn.Parameter:
    """As `tensor`, a Parameter."""
    plain = _over_block(place, getattr(torch, dtype), shape, strides, _target(flags))
    return torch.nn.Parameter(plain, requires_grad=bool(flags & REQUIRES_GRAD))


def subclass(
    cls: type[torch.Tensor],
    place: Place,
    dtype: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    flags: int,
) -> torch.Tensor:
    """As `tensor`, of a subclass, without calling its constructor."""
    plain = _over_block(place, getattr(torch, dtype), shape, strides, _target(flags))
    return torch.Tensor._make_subclass(cls, plain, bool(flags & REQUIRES_GRAD))


def set_state(obj: torch.Tensor, state: Value) -> None:
    """Give a tensor the attributes that it had."""
    torch_utils._set_obj_state(obj, state)


def array(place: Place, dtype: Value, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> Value:
    """An array over the bytes at ``place``, with ``strides`` in bytes (None: C order)."""
    if place == -1:
        return np.empty(shape, dtype)
    kind = np.dtype(dtype)
    buffer = _frame().array_buffer(place, math.prod(shape) * kind.itemsize)
    return np.ndarray(shape, kind, buffer=buffer, strides=strides)


def token(index: int) -> Value:
    """The object that travelled as token ``index``."""
    return _frame().token(index)
