"""A ring in the memory of one CUDA device, for ranks that share it: the ring's sockets, with handles of the device.

Needs a device; torch's own way of sharing a tensor between processes makes the handles.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from phalanx.errors import DeclarationError

__all__ = ["DeviceSegments"]


class _DeviceSegment:
    """Memory of a device that two processes see."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    def handle(self) -> tuple[bytes, list[int]]:
        """See :class:`phalanx.weights.transports.segments.Segment`."""
        from torch.multiprocessing.reductions import (
            reduce_tensor,
        )  # starts torch's sharing: only where it is used

        return pickle.dumps(reduce_tensor(self.memory)), []

    def settle(self) -> None:
        """Until the copies that this process began on the device are done."""
        torch.cuda.current_stream(self.memory.device).synchronize()

    def close(self) -> None:
        """Given back once both processes let go of it."""
        self.memory = torch.empty(0, dtype=torch.uint8)


class DeviceSegments:
    """Segments on one CUDA device, as ``kind=`` of the ends of a ring.

    Args:
        device: index of the device in this process.

    Raises:
        DeclarationError: torch sees no such device.
    """

    name = "CUDA IPC"

    def __init__(self, device: int = 0) -> None:
        if not torch.cuda.is_available() or device >= torch.cuda.device_count():
            raise DeclarationError(
                f"weights cannot be shared on CUDA device {device}: torch sees {torch.cuda.device_count()} devices "
                "here; use host segments"
            )
        self._device = torch.device("cuda", device)

    def make(self, nbytes: int) -> _DeviceSegment:
        """See :class:`phalanx.weights.transports.segments.SegmentKind`."""
        return _DeviceSegment(torch.empty(nbytes, dtype=torch.uint8, device=self._device))

    def open(self, nbytes: int, told: bytes, fds: list[int]) -> _DeviceSegment:
        """See :class:`phalanx.weights.transports.segments.SegmentKind`. The peer is a process of this user: it is
        believed."""
        rebuild: Any
        rebuild, arguments = pickle.loads(told)
        memory: torch.Tensor = rebuild(*arguments)
        return _DeviceSegment(memory[:nbytes])
