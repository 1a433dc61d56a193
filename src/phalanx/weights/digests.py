"""Digests of sent and of arrived boxes, comparable between sides that are sharded differently.

The elements of a box are digested in the box's own order, for any layout of the side. Boxes that were swapped, a
neighbor's box and rows in another order therefore differ. A wrong ``rename`` between tensors of equal shape is not
detected, because both sides name the box by the same pair.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from phalanx.weights.boxes import blocks
from phalanx.weights.plan import Plan
from phalanx.weights.tensors import INTEGERS, cut, dtype_named

Verify = Literal["sampled", "full", "off"]
"""Extent of verification: a sample of the elements (default), every bit, or nothing."""

DIGEST_BYTES = 8
_STRIDE_BYTES = 1 << 15
"""A sample has an element of about each so many bytes: it costs the cache lines that it touches."""
_FEWEST_ROWS = 64
"""Every row of a matrix with no more rows is sampled."""
_TURN = 40503
"""Prime to every step of a sample, so that each position is sampled in some version."""
_BLOCK_BYTES = 1 << 20
"""Size of the blocks in which memory that is not contiguous is digested in full, so that they stay in the cache."""


def digest_boxes(
    plan: Plan,
    tensors: Mapping[str, torch.Tensor],
    side: Literal["source", "target"],
    *,
    verify: Verify = "sampled",
    version: int = 0,
) -> dict[int, list[tuple[str, bytes]]]:
    """Return (label, digest) of all boxes that a rank sends or has received, by peer, in the order of the plan.

    A label names the tensor and the box.

    Args:
        plan: the rank's part of the plan.
        tensors: local tensors of the rank by name.
        version: moves the sample from sync to sync, equally on both sides.
    """
    digests: dict[int, list[tuple[str, bytes]]] = defaultdict(list)
    for batch, pair, box in plan.transfers() if verify != "off" else ():
        name, at, peers = pair.source, box.source_at, box.targets
        if side == "target":
            name, at, peers = pair.target, box.target_at, (box.source,)
        part, dtype = cut(tensors[name], at, box.box.sizes), dtype_named(batch.dtype)
        digest = tensor_digest(part, dtype, verify=verify, version=version)
        for peer in peers:
            digests[peer].append((f"{pair.target} {box.box}", digest))
    return digests


def tensor_digest(
    tensor: torch.Tensor,
    dtype: torch.dtype | None = None,
    *,
    verify: Verify = "sampled",
    version: int = 0,
) -> bytes:
    """Return 8 bytes that depend on the elements of ``tensor``, as ``dtype``, and on their order.

    A sample has an element of about each 32 KB, and of each row (the last dimension) if rows are few. ``version``
    decides which element.
    """
    dtype = dtype or tensor.dtype
    if verify == "full":
        shape, limit = tuple(tensor.shape), max(1, _BLOCK_BYTES // dtype.itemsize)
        together = tensor.is_contiguous() and tensor.dtype == dtype
        parts = [tensor] if together else (cut(tensor, at, sizes) for at, sizes in blocks(shape, limit))
        return _xxhash(_bytes(part, dtype) for part in parts)
    index: tuple[Any, ...] = ()
    if tensor.dim() and tensor.numel():
        # by the sent type, which both sides know: both take the same positions
        index = _sampled_elements(tensor.shape, dtype.itemsize, version)
    if tensor.device.type == "cpu" and tensor.dtype == dtype and not tensor.is_conj():
        # numpy takes the sample in a fifth of the time that torch takes
        array: Any = tensor.detach().view(INTEGERS[dtype.itemsize]).numpy()
        return _xxhash([array[index].tobytes()])
    return _xxhash([_bytes(tensor[index], dtype)])


def _sampled_elements(shape: Sequence[int], itemsize: int, version: int) -> tuple[Any, ...]:
    """Return the index of a sample: elements of each row, or of some rows if these are many and short."""
    length = shape[-1]
    step = min(_STRIDE_BYTES // itemsize, length)
    last = slice(version * _TURN % step, None, step)
    if len(shape) == 1:
        return (last,)
    wanted = max(_FEWEST_ROWS, shape[-2] * length * itemsize // _STRIDE_BYTES)
    every = max(1, shape[-2] // wanted)
    return (..., slice(version * _TURN % every, None, every), last)


def _xxhash(blocks: Any) -> bytes:
    from xxhash import xxh3_64  # loaded only if digests are made

    digest = xxh3_64()
    for block in blocks:
        digest.update(block)
    return digest.digest()


def _bytes(tensor: torch.Tensor, dtype: torch.dtype) -> Any:
    """Return the elements as ``dtype`` in contiguous host memory."""
    flat = tensor.detach().to(dtype=dtype).contiguous().reshape(-1)
    if flat.stride(0) != 1:  # a single element keeps the stride of the tensor that it was cut from
        flat = flat.clone(memory_format=torch.contiguous_format)
    array: Any = flat.view(torch.uint8).cpu().numpy()
    return memoryview(array) if flat.numel() else b""
