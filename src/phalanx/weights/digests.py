"""Digests of sent and received boxes, comparable between sides that are sharded differently.

The elements of a box are digested in the order of the box, whatever the layout of the side. Swapped boxes, a neighbor's
box and reordered rows are therefore detected. A wrong ``rename`` between tensors of equal shape is not detected,
because both sides name the box by the same pair.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal

import torch

from phalanx.weights.boxes import Box, blocks, cut, whole
from phalanx.weights.manifest import INTEGERS, bits_of, dtype_named
from phalanx.weights.plan import Plan, Side

Verify = Literal["sampled", "full", "off"]
"""Extent of verification: a sample of the elements (default), every bit, or nothing."""

BoxDigest = tuple[str, Box, bytes]
"""The name of a tensor at the target, a box of it, and the digest of its elements."""

DIGEST_BYTES = 8
_STRIDE_BYTES = 1 << 15
"""Approximate bytes per sampled element. The cost of a sample is the cache lines that it touches."""
_FEWEST_ROWS = 64
"""Minimum number of sampled rows of a matrix, if it has as many."""
_TURN = 2654435761
"""A prime that divides no step of a sample, so that each position is sampled in some version."""
_BLOCK_BYTES = 1 << 20
"""Bytes of the blocks in which non-contiguous memory is digested in full, so that a block fits into the cache."""


def digest_boxes(
    plan: Plan,
    tensors: Mapping[str, torch.Tensor],
    side: Side,
    *,
    verify: Verify = "sampled",
    version: int = 0,
) -> dict[int, list[BoxDigest]]:
    """Return the digests of all boxes that a rank sends or has received, by peer rank, in the plan's order.

    Args:
        plan: the rank's part of the plan.
        version: number that moves the sample from sync to sync, equally on both sides.
    """
    digests: dict[int, list[BoxDigest]] = defaultdict(list)
    viewed: dict[tuple[str, str], Any] = {}
    for batch, pair, box in plan.transfers() if verify != "off" else ():
        name, at, peers = pair.source, box.source_at, box.targets
        if side == "target":
            name, at, peers = pair.target, box.target_at, (box.source,)
        dtype, key = dtype_named(batch.dtype), (name, batch.dtype)
        if key not in viewed:  # once for all boxes of a tensor: a view takes as long as a sample
            viewed[key] = _view(tensors[name], dtype, verify)
        digest = _box_digest(viewed[key], Box(at, box.box.sizes), dtype, verify, version)
        for peer in peers:
            digests[peer].append((pair.target, box.box, digest))
    return digests


def tensor_digest(tensor: torch.Tensor, *, verify: Verify = "sampled", version: int = 0) -> bytes:
    """Return a digest of 8 bytes of the elements of ``tensor`` in their order.

    A sample has about an element per 32 KB, and at least one of each row (the last dimension) if rows are few.
    ``version`` chooses the elements.
    """
    dtype = tensor.dtype
    return _box_digest(_view(tensor, dtype, verify), whole(tensor.shape), dtype, verify, version)


def _view(tensor: torch.Tensor, dtype: torch.dtype, verify: Verify) -> Any:
    """Return a numpy array if possible, which is sampled in a fifth of torch's time; else the tensor."""
    elements = tensor.resolve_conj().resolve_neg()
    if verify == "full" or tensor.device.type != "cpu" or tensor.dtype != dtype:
        return elements
    return elements.view(INTEGERS[dtype.itemsize]).numpy()


def _box_digest(elements: Any, box: Box, dtype: torch.dtype, verify: Verify, version: int) -> bytes:
    """Return the digest of a box of ``elements``, cast to ``dtype``; see :func:`tensor_digest`."""
    import xxhash  # loaded only if digests are made

    if verify == "sampled":
        sample = elements[_sampled_elements(box, dtype.itemsize, version)]
        is_array = not isinstance(sample, torch.Tensor)
        return xxhash.xxh3_64_digest(sample.tobytes() if is_array else bits_of(sample.to(dtype)))
    part, limit = cut(elements, *box), max(1, _BLOCK_BYTES // dtype.itemsize)
    together = part.is_contiguous() and part.dtype == dtype
    digest = xxhash.xxh3_64()
    for block in [part] if together else (cut(part, *block) for block in blocks(box.sizes, limit)):
        digest.update(bits_of(block.to(dtype)))
    return digest.digest()


def _sampled_elements(box: Box, itemsize: int, version: int) -> tuple[slice, ...]:
    """Return the index of a sample of a box: elements of each row, or of some rows if rows are many and short.

    It depends on the sizes of the box, the sent type and the version, so that both sides take the same elements.
    """
    steps, turn = [1] * len(box.sizes), version * _TURN
    if steps:
        length = box.sizes[-1]
        steps[-1] = max(1, min(_STRIDE_BYTES // itemsize, length))
        if len(steps) > 1:
            rows = box.sizes[-2]
            steps[-2] = max(1, rows // max(_FEWEST_ROWS, rows * length * itemsize // _STRIDE_BYTES))
    sample: list[slice] = []
    for start, size, step in zip(*box, steps, strict=True):
        sample.append(slice(start + turn % step, start + size, step))
        turn //= step  # so that rows and columns do not move in step
    return tuple(sample)
