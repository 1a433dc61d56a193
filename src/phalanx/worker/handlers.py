"""Library functions that a driver runs on ranks, with the runtime as first argument.

A function keeps its name and arguments from version to version: a driver may call ranks that an older driver started.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from phalanx.declare.context import context_of
from phalanx.errors import DeclarationError
from phalanx.topology.mesh import Mesh
from phalanx.worker.profiling import ProfileOrder, ProfileReport, Profiling

if TYPE_CHECKING:  # a driver needs the names of these functions, and no runtime
    from phalanx.worker.worker_runtime import WorkerRuntime


def meshes(host: WorkerRuntime) -> dict[str, dict[str, int]]:
    """Return this rank's coordinates by axis in each mesh that its workers registered."""
    return host.context.places()


def order(host: WorkerRuntime) -> list[tuple[int, str]]:
    """Return number and name of the calls that ran here in debug mode, in their order."""
    return list(host.order)


def close(host: WorkerRuntime) -> None:
    """Run the users' ``close()`` of each role."""
    host.close()


def follow(
    host: WorkerRuntime, number: int, world_size: int, meshes: Mapping[str, Mesh] | None = None
) -> None:
    """Belong to another epoch, of a group of that size with these meshes: other ranks have joined or left."""
    host.stay(number)
    for context in (host.context, *map(context_of, host.instances.values())):
        context.epoch, context.world_size, context.meshes = number, world_size, dict(meshes or {})
    if not host.in_driver:
        os.environ["WORLD_SIZE"] = str(world_size)


def meet(host: WorkerRuntime) -> None:
    """Do nothing. The response shows that the rank is idle."""


def leave(host: WorkerRuntime) -> None:
    """Reject new calls: this rank leaves the group."""
    host.leave()


def arm_profile(host: WorkerRuntime, key: str, order: ProfileOrder) -> None:
    """Profile the next calls of this rank.

    Raises:
        DeclarationError: if calls of the rank interleave, or as for :class:`Profiling`.
    """
    if host.place is not None and host.place.asynchronous:
        raise DeclarationError(
            "profile(): the group was made with max_concurrency, so its calls interleave on one thread and no trace "
            "would be of one call; profile a group without it, or call torch.profiler in the worker itself"
        )
    host.profiling = Profiling(key, order)


def end_profile(host: WorkerRuntime, key: str) -> ProfileReport:
    """Stop the profile of this rank, and return its report.

    Raises:
        DeclarationError: if the rank was restarted since.
    """
    profiling = host.profiling
    if profiling is None or profiling.key != key:
        raise DeclarationError("this rank was started anew since, and has forgotten what it had gathered")
    host.profiling = None
    return profiling.finish()
