"""What the library itself asks of a rank: functions that run there with its host, as ``HOST`` calls.

A function here keeps its name and its arguments from version to version: a driver may ask ranks that an older one
has started.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from phalanx.topology.mesh import Mesh

if TYPE_CHECKING:  # a driver needs the names of these functions, and nothing of what they run on
    from phalanx.worker.worker_runtime import WorkerRuntime


def meshes(host: WorkerRuntime) -> dict[str, dict[str, int]]:
    """The place of this rank in each mesh that its workers have registered: coordinates by axis."""
    return host.context.places()


def order(host: WorkerRuntime) -> list[tuple[int, str]]:
    """The calls that ran here in debug mode, in their order: number and name."""
    return list(host.order)


def close(host: WorkerRuntime) -> None:
    """The user's own ``close()`` of each role."""
    host.close()


def enter_epoch(host: WorkerRuntime, number: int) -> None:
    """Belong to another epoch from now on: calls of all ranks of any other one are refused."""
    host.enter_epoch(number)


def follow(
    host: WorkerRuntime, number: int, world_size: int, meshes: Mapping[str, Mesh] | None = None
) -> None:
    """Belong to a group of that size, and to another epoch, from now on: other ranks have come or gone.

    ``meshes`` are those that the group was given, of that size.
    """
    host.follow(number, world_size, meshes or {})


def meet(host: WorkerRuntime) -> None:
    """Be at nothing else: the answer says so."""


def leave(host: WorkerRuntime) -> None:
    """Take no more calls: this rank leaves the group."""
    host.leave()


def keep_record(host: WorkerRuntime, record: bytes) -> None:
    """Keep what a detached group leaves for drivers to come."""
    host.record = record


def recall_record(host: WorkerRuntime) -> bytes | None:
    """What :func:`keep_record` was given."""
    return host.record
