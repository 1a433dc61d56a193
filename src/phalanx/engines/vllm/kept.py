"""Weights between their arrival and vLLM's load: one segment without a name, which all processes of an engine read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping

import torch

from phalanx.errors import InternalError, WeightsError
from phalanx.movers.segments import HostSegment, host_segments
from phalanx.transfer.tensors import dtype_named

__all__ = ["KeptWeights", "opened"]

_ALIGNED = 64
"""Bytes at whose multiples tensors begin."""


class KeptWeights:
    """Tensors in memory that other processes of this node and user can open, by what :meth:`told` says."""

    def __init__(self) -> None:
        self._segment: HostSegment | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._told = ""

    def make(self, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors as ``like``, by name, in a segment of their own; those that were made before are let go of."""
        places: dict[str, int] = {}
        end = 0
        for name, one in like.items():
            places[name] = end
            end += -(-one.numel() * one.element_size() // _ALIGNED) * _ALIGNED
        segment = host_segments.make(max(end, _ALIGNED))
        if not isinstance(segment, HostSegment):
            raise InternalError(f"host memory is {type(segment).__name__}")
        self._close()
        self._segment = segment
        self._tensors = {
            name: _at(segment.memory, places[name], str(one.dtype), tuple(one.shape))
            for name, one in like.items()
        }
        _, (fd,) = segment.handle()
        described = [
            (name, places[name], str(one.dtype).removeprefix("torch."), tuple(one.shape))
            for name, one in like.items()
        ]
        self._told = json.dumps([f"/proc/{os.getpid()}/fd/{fd}", segment.memory.numel(), described])
        return self._tensors

    def take(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> str:
        """See to it that these, all of them, are in the segment; returns what :func:`opened` needs.

        Raises:
            WeightsError: they are others than those that there is memory for.
        """
        given = dict(pairs)
        if given.keys() != self._tensors.keys():
            odd = sorted(given.keys() ^ self._tensors.keys())
            raise WeightsError(f"weights came that are not those that were planned for: {', '.join(odd[:5])}")
        with torch.no_grad():
            for name, one in given.items():
                if one.data_ptr() != self._tensors[name].data_ptr():
                    self._tensors[name].copy_(one)
        return self._told

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is in it."""
        yield from self._tensors.items()

    def close(self) -> None:
        """Let go of the memory."""
        self._tensors = {}
        self._close()

    def _close(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()


def opened(told: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of another process's :class:`KeptWeights`, not copied; to be used up at once."""
    path, nbytes, described = json.loads(told)
    segment = host_segments.open(nbytes, b"", [os.open(path, os.O_RDWR | os.O_CLOEXEC)])
    try:
        for name, place, dtype, shape in described:
            yield name, _at(segment.memory, place, dtype, tuple(shape))
    finally:
        segment.close()


def _at(memory: torch.Tensor, place: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = dtype_named(dtype.removeprefix("torch."))
    nbytes = kind.itemsize
    for size in shape:
        nbytes *= size
    return memory[place : place + nbytes].view(kind).view(shape)
