"""Mini-batches, in the order that torch's DataLoader gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from phalanx.compat.verl._proto.errors import require

T = TypeVar("T")


def require_whole(rows: int, mini_batch_size: int) -> None:
    """Refuse rows that do not fill whole mini-batches."""
    require(
        mini_batch_size > 0 and rows % mini_batch_size == 0,
        f"{rows} % {mini_batch_size} != 0: {rows} rows do not fill whole mini-batches, pad or cut them first",
    )


def iterate(
    rows: int,
    select: Callable[[list[int]], T],
    mini_batch_size: int,
    epochs: int,
    seed: int | None,
    dataloader_kwargs: dict[str, Any] | None,
) -> Iterator[T]:
    """``select(indices)`` for each mini-batch of each epoch; a seed leaves torch's global generator alone."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    loader = DataLoader(
        range(rows),  # pyright: ignore[reportArgumentType] - anything with len and [] will do
        batch_size=mini_batch_size,
        collate_fn=select,
        generator=generator,
        **(dataloader_kwargs or {}),
    )
    for _ in range(epochs):
        yield from loader
