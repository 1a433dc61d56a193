"""Rejoining of a rank that stays when others are replaced: it leaves its process groups, and joins new ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from phalanx.declare.worker import REJOIN
from phalanx.worker.collectives import collectives

if TYPE_CHECKING:  # a driver needs the names of this module, and no runtime
    from phalanx.worker.worker_runtime import WorkerRuntime

#: Key of the world that a rank left and has not joined again: that may need another try.
_LEFT = "left world"


@dataclass(frozen=True)
class Rejoin:
    """The epoch that begins, and the variables that differ in it: where the ranks meet."""

    epoch: int
    environment: Mapping[str, str]


@dataclass(frozen=True)
class _World:
    """Arguments of the former default process group."""

    backend: str
    timeout: timedelta


def rejoin(runtime: WorkerRuntime, request: Rejoin) -> None:
    """Enter an epoch, together with the constructors of the new ranks.

    Each object's ``rejoin()`` is called, in the order of their creation.

    Raises:
        BaseException: if a ``rejoin()`` raises it.
    """
    runtime.stay(request.epoch)
    shared = runtime.context.shared
    world: _World | None = None
    if not runtime.in_driver:  # in the driver a process group belongs to another group, of a single rank
        os.environ.update(request.environment)
        world = shared[_LEFT] = _leave_world() or shared.get(_LEFT)
    shared[REJOIN] = lambda worker: _join_world(worker, world)
    try:
        for instance in runtime.instances.values():
            own = getattr(instance, "rejoin", None)
            if callable(own):
                runtime.run_to_end(own())
            else:
                _join_world(instance, world)
        shared.pop(_LEFT, None)
    finally:
        del shared[REJOIN]


def _leave_world() -> _World | None:
    """Destroy the process groups. Return the arguments of the default process group, None if it did not exist."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return None
    if not dist.is_initialized():
        # An attempt that failed used up the first name of a group, under which new ranks meet.
        dist.distributed_c10d._world.group_count = 0
        return None
    from torch.distributed.constants import default_pg_timeout

    options = getattr(dist.group.WORLD, "options", None)  # torch has no public way to ask
    timeout = getattr(options, "_timeout", None)
    world = _World(dist.get_backend(), timeout if isinstance(timeout, timedelta) else default_pg_timeout)
    collectives.forget()
    dist.destroy_process_group()  # returns at once, even if a thread is in one of its collectives
    return world


def _join_world(worker: Any, world: _World | None) -> None:
    """Create the default process group, once, and the worker's DDP wrappers again: `phalanx.Worker.rejoin`."""
    if world is None:
        return
    import torch.distributed as dist  # there was a process group

    if not dist.is_initialized():
        dist.init_process_group(world.backend, timeout=world.timeout)
    parallel = sys.modules.get("torch.nn.parallel")
    wrapper: Any = getattr(parallel, "DistributedDataParallel", None)
    for name, value in list(vars(worker).items()):
        if wrapper is not None and isinstance(value, wrapper):
            ddp: Any = value
            again = wrapper(
                ddp.module,
                device_ids=ddp.device_ids or None,
                broadcast_buffers=ddp.broadcast_buffers,
                find_unused_parameters=ddp.find_unused_parameters,
                gradient_as_bucket_view=ddp.gradient_as_bucket_view,
            )
            setattr(worker, name, again)
