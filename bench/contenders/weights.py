"""Weights that the contenders sync between two roles, and the layout of each role.

A model is a list of tensors of 8 MB, bfloat16 [4096, 1024]. "FSDP 4 to tp 2": four sources have a quarter of the rows
of each; each of two targets needs half of the rows of even tensors and half of the columns of odd tensors.
"replicated": two sources and two targets with complete tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import torch

ROWS, COLUMNS = 4096, 1024
TENSOR_BYTES = 2 * ROWS * COLUMNS
SHARDED, REPLICATED = "FSDP 4 to tp 2", "replicated 2 to 2"


class Part(NamedTuple):
    """A rectangle of a tensor: offsets and sizes."""

    at: tuple[int, int]
    sizes: tuple[int, int]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this part of a complete tensor, as a view."""
        row, column = self.at
        return tensor[row : row + self.sizes[0], column : column + self.sizes[1]]


class Layout(NamedTuple):
    """Number of ranks and parts of tensors of each role."""

    name: str
    sources: int
    targets: int

    def held(self, rank: int) -> Part:
        """Return the part of each tensor on a source rank."""
        if self.name == REPLICATED:
            return Part((0, 0), (ROWS, COLUMNS))
        rows = ROWS // self.sources
        return Part((rank * rows, 0), (rows, COLUMNS))

    def wanted(self, rank: int, index: int) -> Part:
        """Return the part of tensor ``index`` that a target rank needs."""
        if self.name == REPLICATED:
            return Part((0, 0), (ROWS, COLUMNS))
        if index % 2 == 0:
            rows = ROWS // self.targets
            return Part((rank * rows, 0), (rows, COLUMNS))
        columns = COLUMNS // self.targets
        return Part((0, rank * columns), (ROWS, columns))


LAYOUTS = {SHARDED: Layout(SHARDED, 4, 2), REPLICATED: Layout(REPLICATED, 2, 2)}


def names(megabytes: int) -> list[str]:
    """Return the names of the tensors of a model of that size."""
    return [f"layers.{index}.weight" for index in range(max(1, (megabytes << 20) // TENSOR_BYTES))]


def source_tensors(layout: str, megabytes: int, rank: int) -> dict[str, torch.Tensor]:
    """Return a source rank's tensors at step 0: zeros."""
    sizes = LAYOUTS[layout].held(rank).sizes
    return {name: torch.zeros(sizes, dtype=torch.bfloat16) for name in names(megabytes)}


def target_tensors(layout: str, megabytes: int, rank: int) -> dict[str, torch.Tensor]:
    """Return a target rank's tensors before the first sync: minus ones."""
    chosen = LAYOUTS[layout]
    return {
        name: torch.full(chosen.wanted(rank, index).sizes, -1.0, dtype=torch.bfloat16)
        for index, name in enumerate(names(megabytes))
    }


def is_at(tensors: dict[str, torch.Tensor], step: int) -> bool:
    """Return whether all elements equal the step's number, modulo 100."""
    return all(bool((tensor == step % 100).all()) for tensor in tensors.values())


def train(tensors: dict[str, torch.Tensor], step: int) -> None:
    """Change every element, as an optimizer does."""
    for tensor in tensors.values():
        tensor.fill_(step % 100)


class WeightsRoles(ABC):
    """The two roles of a contender, made once for a layout and a size."""

    def __init__(self, layout: str, megabytes: int) -> None:
        self.layout = layout
        self.megabytes = megabytes

    @abstractmethod
    def train(self, step: int) -> None:
        """Change all weights of the sources."""

    @abstractmethod
    def sync(self, verify: Literal["sampled", "full", "off"]) -> None:
        """Sync the weights to the targets, and return when they have arrived."""

    @abstractmethod
    def is_at(self, step: int) -> bool:
        """Return whether the targets have the weights of that step."""

    @abstractmethod
    def close(self) -> None:
        """End both roles."""
