"""Deltas: the elements that changed since a version that both sides have, bit for bit.

Positions and values, or a compressed exclusive-or, or everything, whichever is smallest. A delta names its base version
and is refused by who has another. The source keeps the base, one more copy of what it sends, and moves it on with
:meth:`Base.confirm` only when all targets have the new version.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from phalanx.errors import WeightsTransferError

__all__ = ["Base", "Delta", "apply_delta", "make_delta"]

Kind = Literal["none", "sparse", "xor", "dense"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_FAR = 0xFFFF
"""A gap of so many elements or more is written as this and the rest: gaps are 16 bits."""
_DENSE_SHARE = 0.2
"""Of changed elements: below it positions and values are always smaller than a compressed exclusive-or."""


@dataclass(frozen=True)
class Delta:
    """What turns a tensor of version ``base`` into the next one; ``changed`` elements differ.

    ``payload``: "sparse" is gaps of 16 bits, then values; "xor" is compressed, byte plane after byte plane; "dense"
    is all bytes; "none" is empty.
    """

    base: int
    kind: Kind
    changed: int
    elements: int
    payload: bytes | memoryview

    @property
    def nbytes(self) -> int:
        """Bytes on the way."""
        return len(self.payload)


def make_delta(new: torch.Tensor, old: torch.Tensor | None, base: int) -> Delta:
    """What changed from ``old`` to ``new``, of equal shape and type; ``old=None`` sends everything.

    Bits are compared, not values: a NaN of other bits and a zero of another sign are changes.
    """
    now = _integers(new)
    if old is None:
        return Delta(base, "dense", now.size, now.size, now.tobytes())
    differs = np.bitwise_xor(now, _integers(old))
    positions = np.flatnonzero(differs)
    if positions.size == 0:
        return Delta(base, "none", 0, now.size, b"")
    options: list[tuple[Kind, bytes]] = [("sparse", _sparse(positions, now))]
    if positions.size > now.size * _DENSE_SHARE:
        options.append(("xor", _packed(differs)))
    kind, payload = min(options, key=lambda option: len(option[1]))
    if len(payload) >= now.nbytes:
        kind, payload = "dense", now.tobytes()
    return Delta(base, kind, int(positions.size), now.size, payload)


def apply_delta(delta: Delta, tensor: torch.Tensor, version: int) -> None:
    """Bring ``tensor`` in place from ``version`` to the one that ``delta`` leads to.

    Raises:
        WeightsTransferError: it is of another version than the delta's base, or of another size; nothing is written.
    """
    if tensor.numel() != delta.elements or (delta.kind != "dense" and version != delta.base):
        raise WeightsTransferError(
            f"a delta from version {delta.base} of {delta.elements} elements came to a tensor of version {version} "
            f"with {tensor.numel()}; this target must be sent everything"
        )
    if delta.kind == "none":
        return
    now = _integers(tensor)  # the tensor's own memory where it lies together on the host, else a copy
    if delta.kind == "dense":
        now[:] = np.frombuffer(delta.payload, now.dtype)
    elif delta.kind == "xor":
        now ^= _unpacked(delta.payload, now.dtype, now.size)
    else:
        positions, values = _read_sparse(delta, now.dtype)
        now[positions] = values
    if now.ctypes.data != tensor.data_ptr():
        with torch.no_grad():
            tensor.detach().copy_(_as_tensor(now, tensor))


def _integers(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    size = tensor.element_size()
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(_INTEGERS[size])
    return flat.numpy().view(_NUMPY[size])


def _as_tensor(array: np.ndarray[Any, Any], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(array.view(np.uint8)).view(like.dtype).view(like.shape)


def _sparse(positions: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> bytes:
    """Gaps between changed positions, then their values. A gap too wide for 16 bits stands as several entries."""
    gaps = np.diff(positions, prepend=-1) - 1
    wide = gaps // _FAR
    if wide.any():
        ends = np.cumsum(wide + 1) - 1
        written = np.full(int(ends[-1]) + 1, _FAR, np.uint16)
        written[ends] = gaps % _FAR
    else:
        written = gaps.astype(np.uint16)
    return written.tobytes() + values[positions].tobytes()


def _read_sparse(delta: Delta, dtype: np.dtype[Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    split = len(delta.payload) - delta.changed * dtype.itemsize
    written = np.frombuffer(delta.payload[:split], np.uint16).astype(np.int64)
    ends = written != _FAR
    # An entry of the widest gap is followed by the rest of it, and stands for no element itself.
    positions = np.cumsum(written + ends)[ends] - 1
    return positions, np.frombuffer(delta.payload[split:], dtype)


def _packed(differs: np.ndarray[Any, Any]) -> bytes:
    """Compressed by byte planes: the upper bytes of near numbers differ in nothing."""
    planes = differs.view(np.uint8).reshape(-1, differs.itemsize).T
    return zlib.compress(np.ascontiguousarray(planes).tobytes(), 1)


def _unpacked(payload: bytes | memoryview, dtype: np.dtype[Any], elements: int) -> np.ndarray[Any, Any]:
    planes = np.frombuffer(zlib.decompress(payload), np.uint8).reshape(dtype.itemsize, elements)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)


class Base:
    """The source's copy of what its targets have, at one version. One more copy of the sent pieces in host memory."""

    def __init__(self) -> None:
        self.version: int | None = None
        self._held: dict[Any, torch.Tensor] = {}
        self._next: dict[Any, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that the copy costs."""
        return sum(one.numel() * one.element_size() for one in self._held.values())

    def delta(self, key: Any, tensor: torch.Tensor) -> Delta:
        """What changed in the piece ``key`` since the base; everything where there is none."""
        now = tensor.detach().cpu().clone()
        self._next[key] = now
        old = self._held.get(key) if self.version is not None else None
        if old is not None and (old.shape != now.shape or old.dtype != now.dtype):
            old = None
        return make_delta(now, old, -1 if self.version is None else self.version)

    def advance(self, key: Any, tensor: torch.Tensor) -> Delta:
        """What changed in the piece ``key`` since the base, which has the piece as it is now from then on.

        For a source that drops its base when a sync fails: it never has two copies.
        """
        held = self._held.get(key) if self.version is not None else None
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            held = tensor.detach().to("cpu", copy=True).contiguous()
            self._held[key] = held
            now: Any = _integers(held)
            return Delta(-1, "dense", now.size, now.size, memoryview(now.view(np.uint8)))
        delta = make_delta(tensor, held, -1 if self.version is None else self.version)
        held.copy_(tensor.detach())
        return delta

    def confirm(self, version: int) -> None:
        """All targets have what was asked for since the last time: it is the base now, as ``version``."""
        self._held.update(self._next)
        self._next = {}
        self.version = version

    def drop(self, *, keep_base: bool = True) -> None:
        """The sync failed: forget what it would have made. ``keep_base=False`` where the targets are of no version."""
        self._next = {}
        if not keep_base:
            self._held, self.version = {}, None
