"""torch's process group of a worker group."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from phalanx.declare.worker import Worker


def join_world(worker: Worker, *, backend: str | None = None, timeout: float = 600.0) -> torch.device:
    """Form torch's default process group over the group's ranks, unless this process has one.

    Roles that share a process share its process group.

    Args:
        backend: torch's name of the backend; default "nccl" if the rank has a CUDA device, else "gloo".
        timeout: seconds after which a collective that some rank does not join fails.

    Returns:
        The rank's device. A CUDA device becomes torch's current device.

    Raises:
        PhalanxError: if the group has several ranks with ``backend="inline"``, which cannot wait for each other.
    """
    device = worker.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(
            backend or ("nccl" if device.type == "cuda" else "gloo"),
            rank=worker.rank,
            world_size=worker.world_size,
            timeout=timedelta(seconds=timeout),
        )
    return device
