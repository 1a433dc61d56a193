"""Recreate tensors and arrays from their descriptions and bytes: the receiving side.

Encoded streams name functions of this module, so renaming a function breaks streams of other versions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phalanx.wire.memory import HUGE_FROM, PARALLEL_FROM, allocate, bytes_at, private_copies, tensor_over
from phalanx.wire.value import Dims, Value, lazy, torch

torch_utils: Any = lazy("torch._utils")

REQUIRES_GRAD = 1

_ALIGNMENT = 16  # bytes of the widest element (complex128)
_COPIED_TOGETHER = 64 << 10  # minimum bytes of a buffer that is copied in parallel with others


class Meter:
    """Counter of decoded bytes (heads and buffers). ``on_value`` is called with the bytes of each value."""

    def __init__(self, on_value: Callable[[int], None] | None = None) -> None:
        self.nbytes = 0
        self._on_value = on_value

    def add(self, nbytes: int) -> None:
        """Add the bytes of a value."""
        self.nbytes += nbytes
        if self._on_value is not None:
            self._on_value(nbytes)


received = Meter()
"""Counter of the bytes that this process decoded, plain pickle aside. Of a stored output, only the rows read count."""


@dataclass(slots=True, kw_only=True, eq=False)
class decoding:
    """Context manager that sets memory and device of the values decoded in its block, by this thread or asyncio task.

    Args:
        readonly: True to return tensors and arrays over the encoded bytes, without a copy; also useful for code that
            copies the values at once, such as a gather. False: private, writable memory, large buffers in huge pages.
            Read-only arrays refuse writes. Torch has no read-only tensors: a write changes the value of every reader.
        restore: function that returns the object of a placeholder; None: the placeholder itself.
        device: device of the tensors; None: the CPU. Arrays stay on the CPU.
        meter: counter of the decoded bytes.
    """

    readonly: bool = False
    restore: Callable[[Any], Any] | None = None
    device: torch.device | None = None
    meter: Meter | None = None
    _token: Token[decoding] = field(init=False)

    def __enter__(self) -> None:
        self._token = _arrival.set(self)

    def __exit__(self, *_: object) -> None:
        _arrival.reset(self._token)


_DEFAULT = decoding()
_arrival: ContextVar[decoding] = ContextVar("phalanx_arrival")


def current_arrival() -> decoding:
    """Return the settings of the innermost `decoding` block of this thread or task."""
    return _arrival.get(_DEFAULT)


class Frame:
    """Buffers and placeholders of a value while it is decoded. Each buffer is copied at most once.

    Buffers are read without a copy if the sender (``readonly``) or the receiver requested it.
    """

    def __init__(
        self, buffers: Sequence[Any], tokens: Sequence[Any], readonly: bool, arrival: decoding
    ) -> None:
        self._views = [memoryview(buffer).toreadonly() for buffer in buffers]
        self.tokens = tokens
        self._private = not (arrival.readonly or readonly)
        self.restore = arrival.restore
        self._blocks: dict[int, torch.Tensor] = {}
        self._arrays: dict[int, bytearray] = {}
        self._on_device: dict[int, torch.Tensor] = {}
        copied = self._private and arrival.device is None
        if copied and sum(view.nbytes for view in self._views) >= PARALLEL_FROM:
            large = [place for place, view in enumerate(self._views) if view.nbytes >= _COPIED_TOGETHER]
            copies = private_copies([self._views[place] for place in large])
            self._blocks = dict(zip(large, copies, strict=True))

    def block(self, place: int, device: torch.device | None = None) -> torch.Tensor:
        """Return a tensor of any dtype over the bytes of a buffer: a private copy, a view, or a copy on ``device``."""
        view = self._views[place]
        if device is not None:
            if place not in self._on_device:
                self._on_device[place] = _window(view).to(device)
            return self._on_device[place]
        if place not in self._blocks:
            if not self._private:
                self._blocks[place] = _window(view)
            elif place in self._arrays:  # shared with an array
                self._blocks[place] = torch.frombuffer(self._arrays[place], dtype=torch.uint8)
            else:
                (self._blocks[place],) = private_copies([view])
        return self._blocks[place]

    def tensor(
        self,
        place: int,
        dtype: torch.dtype,
        shape: Dims,
        strides: Dims | None,
        device: torch.device | None,
    ) -> torch.Tensor:
        """Return the bytes of a buffer as a tensor."""
        view = self._views[place]
        shared = place in self._blocks or place in self._arrays
        if not self._private or device is not None or shared or view.nbytes >= HUGE_FROM:
            return tensor_over(self.block(place, device), dtype, shape, strides)
        # For a small tensor this is faster than a block of bytes with a tensor over it.
        where: dict[str, Any] = {"dtype": dtype, "device": "cpu"}
        made = (
            torch.empty(shape, **where) if strides is None else torch.empty_strided(shape, strides, **where)
        )
        self._blocks[place] = made
        bytes_at(made, made.data_ptr(), view.nbytes)[:] = view
        return made

    def array_buffer(self, place: int) -> Value:
        """Return the bytes of a buffer for arrays and other types, writable only if they are a private copy."""
        view = self._views[place]
        if not self._private:
            return _aligned(view).data.toreadonly()
        if place in self._blocks or view.nbytes >= HUGE_FROM:  # shared with a tensor, or huge pages
            return tensor_over(self.block(place), torch.uint8, (view.nbytes,)).numpy()
        if place not in self._arrays:
            self._arrays[place] = bytearray(view)
        return self._arrays[place]


#: The frame of the value that this thread or task decodes.
open_frame: ContextVar[Frame] = ContextVar("phalanx_open_frame")


def _aligned(view: memoryview) -> np.ndarray[Any, Any]:
    """Return the bytes as an array, copied only if their address is not aligned for every dtype."""
    given = np.frombuffer(view, dtype=np.uint8)
    if given.__array_interface__["data"][0] % _ALIGNMENT == 0:
        return given
    block = allocate(given.nbytes).numpy()
    block[:] = given
    return block


def _window(view: memoryview) -> torch.Tensor:
    """Return the bytes as a tensor that must not be written to; they are copied only if they are not aligned."""
    memory = _aligned(view)
    return torch.from_numpy(bytes_at(memory, memory.__array_interface__["data"][0], memory.nbytes))


def _tensor(
    place: int, dtype: str, shape: Dims, strides: Dims | None, flags: int
) -> tuple[torch.Tensor, bool]:
    """Return a tensor over a buffer (-1: no bytes), and whether it requires grad.

    ``strides`` are in elements; None: contiguous.
    """
    kind, device, requires_grad = getattr(torch, dtype), current_arrival().device, bool(flags & REQUIRES_GRAD)
    if device is not None and device.type == "cpu":
        device = None
    if place == -1:
        return torch.empty_strided(shape, strides or (), dtype=kind, device=device or "cpu"), requires_grad
    return open_frame.get().tensor(place, kind, shape, strides, device), requires_grad


def tensor(*description: Any) -> torch.Tensor:
    """Return a tensor over a buffer. Takes the arguments of `_tensor`, as the next two functions."""
    made, requires_grad = _tensor(*description)
    return made.requires_grad_() if requires_grad else made


def parameter(*description: Any) -> torch.nn.Parameter:
    """Return a Parameter over a buffer."""
    return torch.nn.Parameter(*_tensor(*description))


def subclass(cls: type[torch.Tensor], *description: Any) -> torch.Tensor:
    """Return an instance of ``cls`` over a buffer, without calling its constructor."""
    return torch.Tensor._make_subclass(cls, *_tensor(*description))


def tensor_dict(rebuild: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Return a TensorDict. Its device, if it has one, becomes that of its tensors, which differs from the sender's."""
    made, device = rebuild(*arguments), current_arrival().device or "cpu"
    return made if made.device is None or made.device.type == "meta" else made.to(device)


def set_state(obj: torch.Tensor, state: Value) -> None:
    """Restore the attributes of a tensor."""
    torch_utils._set_obj_state(obj, state)


def array(place: int, dtype: Value, shape: Dims, strides: Dims | None) -> Value:
    """Return an array over a buffer (-1: no bytes), with ``strides`` in bytes (None: C order)."""
    if place == -1:
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, buffer=open_frame.get().array_buffer(place), strides=strides)


def token(index: int) -> Value:
    """Return the object of placeholder ``index``, to which a pickle refers once."""
    frame = open_frame.get()
    given = frame.tokens[index]
    return given if frame.restore is None else frame.restore(given)
