"""Rows of nested tensors, which torch itself cuts and joins only in part.

A nested tensor of layout jagged holds rows that differ in one dim, the ragged one: 1 for sequences
(length, ...), 2 for position ids of several kinds (kinds, length). Its values lie end to end along that dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.compat.verl._proto.errors import Refused, require


def ragged_dim(tensor: torch.Tensor) -> int:
    """The dim of a jagged tensor in which its rows differ, counted with the row dim."""
    return getattr(tensor, "_ragged_idx", 1)


def nested_of(rows: Sequence[torch.Tensor], dim: int | None = None) -> torch.Tensor:
    """A jagged tensor of ``rows``; ``dim`` is the ragged one, by default the one in which the rows differ.

    Rows that differ in no dim are taken to be ragged in their last one.

    Raises:
        Refused: no rows, rows without dims, or rows that differ in another dim than ``dim``.
    """
    rows = list(rows)
    require(rows, "Must provide at least one tensor: a nested tensor needs a row, but the list is empty")
    require(
        all(row.dim() and row.dim() == rows[0].dim() for row in rows),
        f"rows of shapes {_shapes(rows)} make no nested tensor: give rows of one number of dims, at least 1",
    )
    most = rows[0].dim()
    require(
        dim is None or 1 <= dim <= most,
        f"ragged_idx must be in [1, {most}]. Got ragged_idx={dim!r} and sample_dim={most!r}",
    )
    dim = _differing_dim(rows) if dim is None else dim
    try:
        values = torch.cat(rows, dim=dim - 1)
    except (RuntimeError, IndexError) as error:
        raise Refused(
            f"rows of shapes {_shapes(rows)} differ elsewhere than in ragged dim {dim}: {error}"
        ) from error
    lengths = torch.tensor([0, *(row.shape[dim - 1] for row in rows)], device=values.device)
    return torch.nested.nested_tensor_from_jagged(values, lengths.cumsum(0), jagged_dim=dim)


def _differing_dim(rows: Sequence[torch.Tensor]) -> int:
    differing = [d + 1 for d in range(rows[0].dim()) if len({row.shape[d] for row in rows}) > 1]
    return differing[0] if differing else rows[0].dim()


def slice_nested(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Rows ``start`` to ``stop``: a view of a jagged tensor whose values lie without holes."""
    jagged: Any = tensor
    if tensor.layout is not torch.jagged or jagged.lengths() is not None:
        return _rebuilt(tensor, tensor.unbind()[start:stop])
    dim, offsets = ragged_dim(tensor), jagged.offsets()
    first, last = int(offsets[start]), int(offsets[stop])
    values = jagged.values().narrow(dim - 1, first, last - first)
    return torch.nested.nested_tensor_from_jagged(values, offsets[start : stop + 1] - first, jagged_dim=dim)


def take_nested(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows by index, repeats allowed."""
    if not len(indices):
        return slice_nested(tensor, 0, 0)
    rows = tensor.unbind()
    return _rebuilt(tensor, [rows[i] for i in indices.tolist()])


def join_nested(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all ``tensors``, in order.

    Raises:
        Refused: no tensors, or one of them is not nested.
    """
    require(tensors, "there are no nested tensors to join: give at least one")
    kinds = [type(tensor).__name__ for tensor in tensors]
    require(
        all(tensor.is_nested for tensor in tensors),
        f"only nested tensors can be joined with nested ones, but got {kinds}",
    )
    filled = [tensor for tensor in tensors if tensor.size(0)] or [tensors[0]]
    if len(filled) == 1:
        return filled[0].clone()
    return _rebuilt(filled[0], [row for tensor in filled for row in tensor.unbind()])


def equal_nested(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have the same rows."""
    rows, others = one.unbind(), other.unbind()
    return len(rows) == len(others) and all(
        a.shape == b.shape and bool((a == b).all()) for a, b in zip(rows, others, strict=True)
    )


def _rebuilt(like: torch.Tensor, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    if like.layout is not torch.jagged:
        return torch.nested.nested_tensor(list(rows), dtype=like.dtype, device=like.device)
    if not rows:
        return slice_nested(torch.nested.as_nested_tensor(list(like.unbind()), layout=torch.jagged), 0, 0)
    return nested_of(rows, ragged_dim(like))


def _shapes(rows: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(row.shape) for row in rows]
