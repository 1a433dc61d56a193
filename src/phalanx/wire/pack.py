"""Describe tensors and arrays, and collect their bytes: the sending side.

These parts of a tensor or array are sent:

* Only the bytes that it covers, never the rest of its storage. Dense tensors (contiguous, or a permutation of
  contiguous, such as a transpose or Fortran order) are not copied and keep their strides. Other tensors (a column, a
  step, an expanded or negatively strided tensor) are made contiguous first, and arrive contiguous.
* Conjugate and negative bits are resolved: the values are the same, the bits are not set any more.
* Leaves keep ``requires_grad``. A tensor with autograd history arrives detached, without requiring grad (a jagged
  tensor as a leaf that requires grad). ``.grad`` and hooks are not sent, attributes (``tensor.__dict__``) are.
* Aliasing inside a value: references to the same object stay so. Different objects that cover exactly the same
  bytes (``t`` and ``t.T``, ``t`` and ``t.detach()``, an array and the tensor over it) are sent once and share
  memory again. Views that overlap only in part arrive as independent copies.
* Tensors of an accelerator are copied through host memory.
* Subclasses of ``torch.Tensor`` without their own pickling keep their type. Subclasses with it (jagged nested
  tensors, DTensor), and sparse, quantized and meta tensors use their own pickling; the plain tensors inside them are
  sent as above. ``numpy.memmap`` arrives as a plain array.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from phalanx.wire import unpack
from phalanx.wire.memory import Array, bytes_at, bytes_of
from phalanx.wire.value import Dims, Value, torch

Reduced = tuple[Any, ...]


class Sink:
    """The distinct buffers of a value, in the order of their first use."""

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self._places: dict[tuple[Any, int, int], tuple[int, Any]] = {}

    def place_of(
        self, owner: Value, device: torch.device | None, address: int, nbytes: int, read: Callable[[], Any]
    ) -> int:
        """Return the index of the buffer with these bytes of ``device`` (None: the host).

        ``read()`` returns the bytes as a uint8 array. ``owner`` is kept alive, so that its address is not reused.
        """
        key = (device, address, nbytes)
        if key not in self._places:
            self._places[key] = len(self.buffers), owner
            self.buffers.append(memoryview(read()).toreadonly())
        return self._places[key][0]


def reduce_tensor(sink: Sink, tensor: torch.Tensor) -> Reduced | None:
    """Put the bytes of ``tensor`` into ``sink``. Return its pickle reduction; None: its own pickling applies."""
    cls = type(tensor)
    if cls is torch.Tensor or cls is torch.nn.Parameter:
        plain = tensor.detach() if tensor.requires_grad else tensor
    elif _pickles_itself(cls):
        return None
    else:
        with torch._C.DisableTorchFunctionSubclass():
            plain = tensor.detach().as_subclass(torch.Tensor)
    if plain.layout is not torch.strided or plain.is_quantized or plain.is_nested or plain.is_meta:
        return None
    facts = _describe(sink, plain, tensor.requires_grad and tensor.is_leaf)
    if cls is torch.Tensor:
        reduced = (unpack.tensor, facts)
        if not tensor.__dict__:
            return reduced
    elif cls is torch.nn.Parameter:
        reduced = (unpack.parameter, facts)
    else:
        reduced = (unpack.subclass, (cls, *facts))
    state = unpack.torch_utils._get_obj_state(tensor)  # __dict__ and slots, as in torch's own pickling
    return (*reduced, state, None, None, unpack.set_state) if state else reduced


def _pickles_itself(cls: type) -> bool:
    """Return whether the class defines its own pickling, or wraps other tensors instead of having own memory."""
    return (
        cls.__reduce_ex__ not in (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__)
        or cls.__reduce__ is not torch.Tensor.__reduce__
        or cls.__setstate__ is not torch.Tensor.__setstate__  # pyright: ignore[reportAttributeAccessIssue]
        or cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]
    )


def _describe(sink: Sink, plain: torch.Tensor, requires_grad: bool) -> Reduced:
    """Return the index of the buffer (-1: no bytes), dtype, shape, strides (None: contiguous) and flags."""
    flags = unpack.REQUIRES_GRAD if requires_grad else 0
    where = None if plain.is_cpu else plain.device
    dtype, shape, count = str(plain.dtype).removeprefix("torch."), tuple(plain.shape), plain.numel()
    if count == 0:
        return -1, dtype, shape, tuple(plain.stride()), flags
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    strides = None
    if not plain.is_contiguous():
        if _is_dense(shape, plain.stride()):
            strides = tuple(plain.stride())
        else:
            plain = plain.contiguous()
    address, nbytes = plain.data_ptr(), count * plain.element_size()

    def read() -> Value:
        if where is None:
            return bytes_at(plain, address, nbytes)
        flat = plain.view(-1) if strides is None else plain.as_strided((count,), (1,))
        return bytes_of(flat.to("cpu"))

    return sink.place_of(plain, where, address, nbytes, read), dtype, shape, strides, flags


def _is_dense(shape: Dims, strides: Dims, element: int = 1) -> bool:
    """Return whether elements of ``element`` stride units each fill memory without gaps or overlaps."""
    expected = element
    for stride, size in sorted(
        (stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def reduce_array(sink: Sink, array: Array) -> Reduced | None:
    """Put the bytes of ``array`` into ``sink``. Return its pickle reduction, or None for arrays of objects."""
    dtype = array.dtype
    if dtype.hasobject:
        return None
    name = dtype if dtype.metadata is not None else _dtype_name(dtype) or dtype
    if array.nbytes == 0:
        return unpack.array, (-1, name, array.shape, None)
    strides = None
    if not array.flags.c_contiguous:
        if _is_dense(array.shape, array.strides, dtype.itemsize):
            strides = array.strides
        else:
            array = np.ascontiguousarray(array)

    def read() -> Value:
        flat = array if strides is None else array.transpose(_slowest_first(array))
        return flat.reshape(-1).view(np.uint8)

    place = sink.place_of(array, None, array.__array_interface__["data"][0], array.nbytes, read)
    return unpack.array, (place, name, array.shape, strides)


def _slowest_first(array: Array) -> list[int]:
    return sorted(range(array.ndim), key=lambda axis: -array.strides[axis])


@functools.lru_cache(maxsize=256)
def _dtype_name(dtype: np.dtype[Any]) -> str | None:
    """Return NumPy's short name of a dtype, or None if the name does not describe the dtype completely.

    Dtypes that differ only in metadata are equal, also as keys of the cache, so the caller checks ``metadata`` itself.
    """
    if dtype.names is not None or dtype.subdtype is not None:
        return None
    try:
        return dtype.str if np.dtype(dtype.str) == dtype else None
    except TypeError:
        return None
