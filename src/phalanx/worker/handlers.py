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


def meshes(runtime: WorkerRuntime) -> dict[str, dict[str, int]]:
    """Return this rank's coordinates by axis in each mesh that its workers registered."""
    return runtime.context.places()


def call_log(runtime: WorkerRuntime) -> list[tuple[int, str]]:
    """Return number and name of the calls that ran here in debug mode, in their order."""
    return list(runtime.call_log)


def close(runtime: WorkerRuntime) -> None:
    """Run the users' ``close()`` of each role."""
    runtime.close()


def follow(
    runtime: WorkerRuntime, number: int, world_size: int, meshes: Mapping[str, Mesh] | None = None
) -> None:
    """Belong to another epoch, of a group of that size with these meshes: other ranks have joined or left."""
    runtime.stay(number)
    for context in (runtime.context, *map(context_of, runtime.instances.values())):
        context.epoch, context.world_size, context.meshes = number, world_size, dict(meshes or {})
    if not runtime.in_driver:
        os.environ["WORLD_SIZE"] = str(world_size)


def meet(runtime: WorkerRuntime) -> None:
    """Do nothing. The response shows that the rank is idle."""


def leave(runtime: WorkerRuntime) -> None:
    """Reject new calls: this rank leaves the group."""
    runtime.leave()


def arm_profile(runtime: WorkerRuntime, key: str, order: ProfileOrder) -> None:
    """Profile the next calls of this rank.

    Raises:
        DeclarationError: if calls of the rank interleave, or as for :class:`Profiling`.
    """
    if runtime.place is not None and runtime.place.asynchronous:
        raise DeclarationError(
            "profile(): the group was made with max_concurrency, so its calls interleave on one thread and no trace "
            "would be of one call; profile a group without it, or call torch.profiler in the worker itself"
        )
    runtime.profiling = Profiling(key, order)


def end_profile(runtime: WorkerRuntime, key: str) -> ProfileReport:
    """Stop the profile of this rank, and return its report.

    Raises:
        DeclarationError: if the rank was restarted since.
    """
    profiling = runtime.profiling
    if profiling is None or profiling.key != key:
        raise DeclarationError("this rank was started anew since, and has forgotten what it had gathered")
    runtime.profiling = None
    return profiling.finish()
