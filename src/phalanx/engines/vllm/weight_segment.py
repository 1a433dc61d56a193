"""Weights between their arrival and vLLM's load: one segment without a name, which all processes of an engine read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping

import torch

from phalanx.weights.shared_memory import OpenedTensors, SharedLayout, SharedTensors

__all__ = ["KeptWeights", "opened"]


class KeptWeights:
    """Tensors in memory that other processes of this node and user can open, by what :meth:`take` says."""

    def __init__(self) -> None:
        self._own: SharedTensors | None = None

    def take(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """See to it that these are in a segment, where a sync puts them anyway; returns what :func:`opened` needs."""
        placed = SharedTensors.holding(tensors) or self._copied(tensors)
        return json.dumps([f"/proc/{os.getpid()}/fd/{placed.fd}", *placed.layout])

    def _copied(self, tensors: Mapping[str, torch.Tensor]) -> SharedTensors:
        self.close()
        self._own = placed = SharedTensors(tensors)
        with torch.no_grad():
            for name, one in tensors.items():
                placed.tensors[name].copy_(one)
        return placed

    def close(self) -> None:
        """Let go of the memory."""
        own, self._own = self._own, None
        if own is not None:
            own.close()


def opened(told: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of another process's :class:`KeptWeights`, not copied; to be used up at once."""
    path, *layout = json.loads(told)
    seen = OpenedTensors(SharedLayout(*layout), os.open(path, os.O_RDWR | os.O_CLOEXEC))
    try:
        yield from seen.tensors.items()
    finally:
        seen.close()
