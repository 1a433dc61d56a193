"""Batches made longer, shorter, folded and unfolded, and one made of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict

from phalanx.compat.verl._proto import parts
from phalanx.compat.verl._proto.data import DataProto, DataProtoItem
from phalanx.compat.verl._proto.errors import require


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """``data`` with its first rows appended (over again, if they are few), and how many were.

    The number of rows is then a multiple of ``size_divisor``. Without rows nothing is appended; where nothing is,
    ``data`` itself is given back.

    Raises:
        Refused: ``data`` is no DataProto, or the divisor is below 1.
    """
    require(isinstance(data, DataProto), f"data must be a DataProto, but got a {type(data).__name__}")
    require(size_divisor > 0, f"rows cannot be padded to a multiple of {size_divisor}: expected at least 1")
    rows = len(data)
    pad_size = -rows % size_divisor
    if not rows or not pad_size:
        return data, 0
    return data.select_idxs(torch.arange(rows + pad_size) % rows), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """``data`` without its last ``pad_size`` rows."""
    return data if pad_size == 0 else data.slice(0, len(data) - pad_size)


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """``new_batch_size`` rows of equally many consecutive rows of ``data``, which is not changed.

    Raises:
        Refused: the rows do not divide by ``new_batch_size``.
    """
    rows = len(data)
    require(
        new_batch_size > 0 and rows % new_batch_size == 0,
        f"{rows} rows cannot be folded into {new_batch_size} rows of equally many",
    )
    batch = data.batch
    if batch is not None:
        held = {key: parts.folded(value, new_batch_size) for key, value in batch.items()}
        batch = TensorDict(held, batch_size=[new_batch_size], device=batch.device)
    arrays = {key: parts.folded(column, new_batch_size) for key, column in data.non_tensor_batch.items()}
    return type(data)(batch, arrays, dict(data.meta_info))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """The first ``batch_dims`` dims of every column as rows: the inverse of `fold_batch_dim`.

    Raises:
        Refused: a column has fewer dims.
    """
    batch = data.batch
    if batch is not None:
        held = {key: parts.flattened(key, value, batch_dims) for key, value in batch.items()}
        rows = next(iter(held.values())).shape[:1] if held else batch.batch_size
        batch = TensorDict(held, batch_size=rows, device=batch.device)
    arrays = {key: parts.flattened(key, column, batch_dims) for key, column in data.non_tensor_batch.items()}
    return type(data)(batch, arrays, dict(data.meta_info))


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Rows as a batch: tensors stacked, objects in arrays; ``meta_info`` is left behind.

    Raises:
        Refused: there are no rows, or only some have tensors.
    """
    require(x, "no rows were given: a batch needs at least one DataProtoItem")
    keys = list(x[0].non_tensor_batch)
    arrays = {key: np.array([item.non_tensor_batch[key] for item in x], dtype=object) for key in keys}
    return DataProto(parts.stacked([item.batch for item in x]), arrays)
