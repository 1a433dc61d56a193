"""A rank that stays when others are replaced: it leaves the process groups of before, and joins new ones with them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from phalanx.declare.worker import REJOIN
from phalanx.worker.control import control

if TYPE_CHECKING:  # what is asked of a rank is named where nothing of the rank is there
    from phalanx.worker.worker_runtime import WorkerRuntime

__all__ = ["Rejoin", "rejoin"]


#: Where a rank keeps what it left until it has joined anew: another try may be needed for that.
_LEFT = "left world"


@dataclass(frozen=True)
class Rejoin:
    """The epoch that begins, and what of the environment is another one in it: where the ranks meet."""

    epoch: int
    environment: Mapping[str, str]


@dataclass(frozen=True)
class _World:
    """The default process group that was: what one like it is made with."""

    backend: str
    timeout: timedelta


def rejoin(host: WorkerRuntime, told: Rejoin) -> None:
    """Enter an epoch in the process that this rank has, together with the constructors of the ranks that are new.

    Each object's ``rejoin()`` is called, in the order in which they were made.

    Raises:
        What one of them raises.
    """
    host.stay(told.epoch)
    shared = host.context.shared
    world: _World | None = None
    if not host.in_driver:  # where a process group is that of another group: it is of one rank
        os.environ.update(told.environment)
        world = shared[_LEFT] = _leave_world() or shared.get(_LEFT)
    shared[REJOIN] = lambda worker: _again(worker, world)
    try:
        for instance in host.instances.values():
            own = getattr(instance, "rejoin", None)
            if callable(own):
                host.at_end(own())
            else:
                _again(instance, world)
        shared.pop(_LEFT, None)
    finally:
        del shared[REJOIN]


def _leave_world() -> _World | None:
    """Forget the process groups; what the default one was made with, None if there was none."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return None
    if not dist.is_initialized():
        # An attempt that failed has used up the first name of a group, which new ranks meet under.
        dist.distributed_c10d._world.group_count = 0
        return None
    world = _World(dist.get_backend(), _timeout(dist))
    if (channel := control()) is not None:
        channel.forget_groups()
    dist.destroy_process_group()  # returns at once also where a thread still stands in one of its collectives
    return world


def _timeout(dist: Any) -> timedelta:
    from torch.distributed.constants import default_pg_timeout  # torch is there

    group = dist.group.WORLD
    options = getattr(group, "options", None)  # torch has no public way to ask
    found = getattr(options, "_timeout", None)
    return found if isinstance(found, timedelta) else default_pg_timeout


def _again(worker: Any, world: _World | None) -> None:
    """What :meth:`phalanx.Worker.rejoin` does: the default process group anew, once, and DDP's wrappers around it."""
    if world is None:
        return
    import torch.distributed as dist  # there was a process group

    if not dist.is_initialized():
        dist.init_process_group(world.backend, timeout=world.timeout)
    parallel = sys.modules.get("torch.nn.parallel")
    wrapper: Any = getattr(parallel, "DistributedDataParallel", None)
    for name, value in list(vars(worker).items()):
        if wrapper is not None and isinstance(value, wrapper):
            setattr(worker, name, _wrapped_again(wrapper, value))


def _wrapped_again(wrapper: Callable[..., Any], old: Any) -> Any:
    return wrapper(
        old.module,
        device_ids=old.device_ids or None,
        broadcast_buffers=old.broadcast_buffers,
        find_unused_parameters=old.find_unused_parameters,
        gradient_as_bucket_view=old.gradient_as_bucket_view,
    )
