"""The weights that the contenders bring from one role to another, and how each side holds them.

A model is a list of tensors of 8 MB, bfloat16 [4096, 1024]. "FSDP 4 to tp 2": four sources hold a quarter of the rows
of each; of the even tensors each of two targets wants half of the rows, of the odd ones half of the columns.
"replicated": two sources and two targets, each with everything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import torch

ROWS, COLUMNS = 4096, 1024
TENSOR_BYTES = 2 * ROWS * COLUMNS
SHARDED, REPLICATED = "FSDP 4 to tp 2", "replicated 2 to 2"


class Part(NamedTuple):
    """A rectangle of a tensor: where it begins, and how large it is."""

    at: tuple[int, int]
    sizes: tuple[int, int]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of a whole tensor, as a view."""
        row, column = self.at
        return tensor[row : row + self.sizes[0], column : column + self.sizes[1]]


class Layout(NamedTuple):
    """How many ranks each side has, and what they hold."""

    name: str
    sources: int
    targets: int

    def held(self, rank: int) -> Part:
        """What a source rank holds of each tensor."""
        if self.name == REPLICATED:
            return Part((0, 0), (ROWS, COLUMNS))
        rows = ROWS // self.sources
        return Part((rank * rows, 0), (rows, COLUMNS))

    def wanted(self, rank: int, index: int) -> Part:
        """What a target rank wants of tensor ``index``."""
        if self.name == REPLICATED:
            return Part((0, 0), (ROWS, COLUMNS))
        if index % 2 == 0:
            rows = ROWS // self.targets
            return Part((rank * rows, 0), (rows, COLUMNS))
        columns = COLUMNS // self.targets
        return Part((0, rank * columns), (ROWS, columns))


LAYOUTS = {SHARDED: Layout(SHARDED, 4, 2), REPLICATED: Layout(REPLICATED, 2, 2)}


def names(megabytes: int) -> list[str]:
    """Names of the tensors of a model of that size."""
    return [f"layers.{index}.weight" for index in range(max(1, (megabytes << 20) // TENSOR_BYTES))]


def source_tensors(layout: str, megabytes: int, rank: int) -> dict[str, torch.Tensor]:
    """What a source rank holds at step 0: zeros."""
    sizes = LAYOUTS[layout].held(rank).sizes
    return {name: torch.zeros(sizes, dtype=torch.bfloat16) for name in names(megabytes)}


def target_tensors(layout: str, megabytes: int, rank: int) -> dict[str, torch.Tensor]:
    """What a target rank has before the first sync: minus ones."""
    chosen = LAYOUTS[layout]
    return {
        name: torch.full(chosen.wanted(rank, index).sizes, -1.0, dtype=torch.bfloat16)
        for index, name in enumerate(names(megabytes))
    }


def is_at(tensors: dict[str, torch.Tensor], step: int) -> bool:
    """Whether all elements are those of a step: its number, as long as that is small."""
    return all(bool((tensor == step % 100).all()) for tensor in tensors.values())


def train(tensors: dict[str, torch.Tensor], step: int) -> None:
    """What an optimizer does: every element is another one afterwards."""
    for tensor in tensors.values():
        tensor.fill_(step % 100)


class WeightsRoles(ABC):
    """The two roles of one contender, made once for a layout and a size."""

    def __init__(self, layout: str, megabytes: int) -> None:
        self.layout = layout
        self.megabytes = megabytes

    @abstractmethod
    def train(self, step: int) -> None:
        """Change all weights of the sources."""

    @abstractmethod
    def sync(self, verify: Literal["sampled", "full", "off"]) -> None:
        """Bring them to the targets; returns when they are there."""

    @abstractmethod
    def is_at(self, step: int) -> bool:
        """Whether the targets have those of that step."""

    @abstractmethod
    def close(self) -> None:
        """End both roles."""
