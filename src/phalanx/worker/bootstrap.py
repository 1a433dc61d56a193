"""Turns a process into a rank: environment and threads, before the user's modules are imported."""

from __future__ import annotations

import contextlib
import os
import sys

from phalanx.declare.context import WorkerContext
from phalanx.declare.worker import REJOINING
from phalanx.wire.messages import RankConfig
from phalanx.worker.output_capture import to_own_file


def apply(setup: RankConfig, in_driver: bool) -> str | None:
    """Write the rank's environment into this process; ranks inside the driver's process swap it per call.

    Also makes the folder of the rank's files, and sends the output of a process of its own there.

    Returns:
        The file with the rank's output.
    """
    if setup.files:
        with contextlib.suppress(OSError):  # a full disk: whoever writes there says so
            os.makedirs(os.path.dirname(setup.files), exist_ok=True)
    if in_driver:
        return None
    log = to_own_file(setup)
    os.environ.update(setup.environment)
    torch = sys.modules.get("torch")
    if torch is not None and setup.threads:  # imported before us: its thread count is already fixed
        torch.set_num_threads(setup.threads)
    return log


def context_of_rank(setup: RankConfig, in_driver: bool) -> WorkerContext:
    """What the users' objects of a rank share, as it was told."""
    context = WorkerContext(
        rank=setup.rank,
        world_size=setup.world_size,
        local_rank=setup.local_rank,
        local_world_size=setup.local_world_size,
        group=setup.group,
        epoch=setup.epoch,
        host=setup.host,
        node_id=setup.node_id,
        accelerator_ids=setup.accelerator_ids,
        device_type=setup.device_type,
        local_device=setup.local_device,
        meshes=setup.meshes,
    )
    context.in_driver = in_driver
    context.shared[REJOINING] = setup.rejoining
    return context
