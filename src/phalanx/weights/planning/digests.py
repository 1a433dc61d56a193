"""Digests of what was sent and of what arrived, one per piece, so that sides of other shards can be compared.

A piece is a box of the global tensor, and its elements are digested in the box's own order, whatever the layout of
the side that does it. Two pieces that were swapped, a neighbour's piece, and rows in another order therefore
differ. What digests cannot find: a wrong ``rename`` between tensors of equal shapes, because both sides name the
piece by the same pair.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from phalanx.errors import DeclarationError, WeightsVerificationError
from phalanx.weights.planning.boxes import Box
from phalanx.weights.planning.resharding_plan import Plan
from phalanx.weights.planning.tensors import cut, dtype_named, name_of

__all__ = ["PieceDigest", "Verify", "compare", "digest_pieces", "tensor_digest"]

Verify = Literal["sampled", "full", "off"]
"""How much is compared: a sample of the elements (by default), every bit, or nothing."""

_STRIDE_BYTES = 8192
"""A sample is one element of about each so many bytes: the cost is that of the cache lines touched."""
_FEWEST_ROWS = 64
"""Of a matrix of no more rows each one is sampled."""
_TURN = 40503
"""Prime to every step of a sample: from version to version each position has its turn."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element: a type of as many bits that numpy has too."""
_BLOCK_BYTES = 1 << 20
"""What is digested in full is copied by blocks that stay in the cache, where it does not lie together or is cast."""


class PieceDigest(NamedTuple):
    """A digest and what it is of: the same on both sides of a piece, whoever made it."""

    source: int
    targets: tuple[int, ...]
    name: str
    where: Box
    digest: bytes


def digest_pieces(
    plan: Plan,
    tensors: Mapping[str, torch.Tensor],
    side: Literal["source", "target"],
    *,
    rank: int,
    verify: Verify = "sampled",
    version: int = 0,
) -> list[PieceDigest]:
    """Digest all that ``rank`` sends, or all that has arrived at it, in the order of the plan.

    Args:
        plan: the whole plan or the rank's part of it.
        tensors: local tensors of the rank by name.
        version: moves the sample from sync to sync, on both sides alike.

    Raises:
        DeclarationError: ``verify`` is none of its values.
    """
    if verify not in ("sampled", "full", "off"):
        raise DeclarationError(f'verify={verify!r}: give "sampled", "full" or "off"')
    if verify == "off":
        return []
    found: list[PieceDigest] = []
    bits = _Bits(tensors)
    for lane, pair, piece in plan.moves():
        mine = piece.source == rank if side == "source" else rank in piece.targets
        if mine:
            name, at = (pair.source, piece.source_at) if side == "source" else (pair.target, piece.target_at)
            digest = (
                bits.sampled(name, at, piece.box.sizes, lane.dtype, version) if verify == "sampled" else None
            )
            if digest is None:
                part = cut(tensors[name], at, piece.box.sizes)
                digest = tensor_digest(part, dtype_named(lane.dtype), verify=verify, version=version)
            found.append(PieceDigest(piece.source, piece.targets, pair.target, piece.box, digest))
    return found


class _Bits:
    """Tensors of host memory as arrays of their bits: cutting and sampling those costs a fifth of what torch takes."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._arrays: dict[str, Any] = {}

    def sampled(
        self, name: str, at: Sequence[int], sizes: Sequence[int], dtype: str, version: int
    ) -> bytes | None:
        """The digest that :func:`tensor_digest` gives; None where the tensor is of another type, or elsewhere."""
        array = self._arrays.get(name)
        if array is None:
            tensor = self._tensors[name]
            if tensor.device.type != "cpu" or name_of(tensor.dtype) != dtype or tensor.is_conj():
                return None
            array = self._arrays[name] = tensor.detach().view(_INTEGERS[tensor.element_size()]).numpy()
        part = array[tuple(slice(start, start + size) for start, size in zip(at, sizes, strict=True))]
        if part.ndim and part.size:
            part = part[_places(part.shape, part.itemsize, version)]
        return _hashed(part.tobytes())


def tensor_digest(
    tensor: torch.Tensor,
    dtype: torch.dtype | None = None,
    *,
    verify: Verify = "sampled",
    version: int = 0,
) -> bytes:
    """8 bytes that depend on the elements of ``tensor``, as ``dtype``, and on their order.

    Sampled: one element of about each 8 KB, and of each row (the last dim) where rows are few; which one depends on
    ``version``.
    """
    dtype = dtype or tensor.dtype
    if verify == "full":
        return _full(tensor, dtype)
    return _hashed(_bytes(_sample(tensor, dtype, version), dtype))


def _sample(tensor: torch.Tensor, dtype: torch.dtype, version: int) -> torch.Tensor:
    if tensor.dim() == 0 or tensor.numel() == 0:
        return tensor
    # By the type on the way, which both sides know, so that both take the same positions.
    return tensor[_places(tensor.shape, dtype.itemsize, version)]


def _places(shape: Sequence[int], itemsize: int, version: int) -> tuple[Any, ...]:
    """The elements of a sample: some of each row, or of some rows where these are many and short."""
    length = shape[-1]
    step = min(_STRIDE_BYTES // itemsize, length)
    last = slice(version * _TURN % step, None, step)
    if len(shape) == 1:
        return (last,)
    wanted = max(_FEWEST_ROWS, shape[-2] * length * itemsize // _STRIDE_BYTES)
    every = max(1, shape[-2] // wanted)
    return (..., slice(version * _TURN % every, None, every), last)


def _hashed(text: Any) -> bytes:
    from xxhash import xxh3_64_digest  # loaded where digests are made: nothing else here needs it

    return xxh3_64_digest(text)


def _full(tensor: torch.Tensor, dtype: torch.dtype) -> bytes:
    from xxhash import xxh3_64  # loaded by those who ask for it: nothing else here needs it

    text: Any = xxh3_64()
    if tensor.is_contiguous() and tensor.dtype == dtype:
        text.update(_bytes(tensor, dtype))
    else:
        for block in _blocks(tensor, max(1, _BLOCK_BYTES // dtype.itemsize)):
            text.update(_bytes(block, dtype))
    return struct.pack("<Q", text.intdigest())


def _blocks(tensor: torch.Tensor, elements: int) -> Iterator[torch.Tensor]:
    """``tensor`` in row-major order, in parts of about so many elements."""
    if tensor.dim() == 0 or tensor.numel() <= elements:
        yield tensor
        return
    rows = elements // max(1, tensor[0].numel())
    if rows == 0:
        for row in tensor:
            yield from _blocks(row, elements)
        return
    yield from tensor.split(rows)


def _bytes(tensor: torch.Tensor, dtype: torch.dtype) -> Any:
    """The elements as ``dtype`` in one piece of host memory."""
    flat = tensor.detach().to(dtype=dtype).contiguous().reshape(-1)
    if flat.stride(0) != 1:  # a single element keeps the stride of what it was cut from
        flat = flat.clone(memory_format=torch.contiguous_format)
    array: Any = flat.view(torch.uint8).cpu().numpy()
    return memoryview(array) if flat.numel() else b""


def compare(sent: Sequence[PieceDigest], arrived: Sequence[PieceDigest], *, source: int, target: int) -> None:
    """Check that ``target`` has what ``source`` sent to it.

    Args:
        sent: the source's digests. arrived: the target's. Both may have pieces of others too.

    Raises:
        WeightsVerificationError: with the names and boxes that differ.
    """
    expected = {
        (one.name, str(one.where)): one.digest
        for one in sent
        if one.source == source and target in one.targets
    }
    found = {(one.name, str(one.where)): one.digest for one in arrived if one.source == source}
    wrong = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
    if not wrong:
        return
    shown = ", ".join(f"{name} {where}" for name, where in wrong[:5]) + (", ..." if len(wrong) > 5 else "")
    error = WeightsVerificationError(
        f"{len(wrong)} of {len(expected)} pieces from source rank {source} are not on target rank {target} what was "
        f"sent: {shown}. Either something wrote to these tensors during the sync, on one of both sides, or they were "
        "damaged on the way: let nothing write to weights while they are synced"
    )
    error.peer = f"source rank {source}"
    raise error
