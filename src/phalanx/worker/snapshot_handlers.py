"""Handlers of snapshots: functions that a driver runs on ranks; see `phalanx.worker.handlers`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.declare.state_declarations import declared_states
from phalanx.wire.lazy import lazy
from phalanx.wire.messages import BackendRef

if TYPE_CHECKING:  # a driver needs the names of these functions, and no torch
    from phalanx.worker import rank_state, state_copies
    from phalanx.worker.worker_runtime import WorkerRuntime
else:
    rank_state = lazy("phalanx.worker.rank_state")
    state_copies = lazy("phalanx.worker.state_copies")

#: Seconds that a copy may take on its way to the rank that fetches it.
FETCH_S = 300.0


class SnapshotRequest(NamedTuple):
    """Copy the state as snapshot ``number``; ``last`` is the previous complete snapshot, 0 if there is none.

    ``again``: the rank's holder has ``last``, so that only the changes since then are sent.
    """

    number: int
    last: int
    again: bool


class SnapshotReply(NamedTuple):
    """Reference to the part that the holder lacks, the bytes of the copy, and the bytes of that part."""

    copy: BackendRef
    nbytes: int
    sent_bytes: int


class RestoreRequest(NamedTuple):
    """Restore snapshot ``number``; ``copy`` refers to a copy that another rank holds, None: the rank's own.

    ``keep_rng``: leave the random generators as they are.
    """

    number: int
    copy: BackendRef | None = None
    keep_rng: bool = False


def has_state(runtime: WorkerRuntime) -> bool:
    """Return whether any role of this rank has a state."""
    declared = declared_states(runtime.context)
    return any(rank_state.has_state(worker, declared.get(role)) for role, worker in runtime.instances.items())


def take(runtime: WorkerRuntime, request: SnapshotRequest) -> SnapshotReply:
    """Copy the state of this rank's roles, and store the part that the holder lacks."""
    copies = _copies(runtime)
    copy = copies.take(request.number, request.last, _states(runtime))
    sent = copies.changed(request.number, request.last, copy, again=request.again)
    return SnapshotReply(runtime.put(sent), copy.nbytes, sent.nbytes)


async def hold(runtime: WorkerRuntime, copies: Mapping[int, BackendRef], number: int, last: int) -> None:
    """Hold copies of other ranks' states."""
    for rank, ref in copies.items():
        _copies(runtime).hold(rank, number, last, await _fetched(runtime, ref))


def give(runtime: WorkerRuntime, rank: int, number: int) -> BackendRef:
    """Return the copy held for another rank."""
    return runtime.put(_copies(runtime).held(rank, number))


def show(runtime: WorkerRuntime) -> BackendRef:
    """Return a copy of the current state."""
    return runtime.put(state_copies.copy_state(_states(runtime)))


async def restore(runtime: WorkerRuntime, request: RestoreRequest) -> int:
    """Restore a snapshot. Return its bytes."""
    copies = _copies(runtime)
    if request.copy is not None:
        copies.put_back(request.number, await _fetched(runtime, request.copy))
    copy = copies.own(request.number)
    states = _states(runtime)
    for role, saved in copy.roles.items():
        state_copies.restore_role(states[role], saved, role)
    for worker in runtime.instances.values():
        state_copies.drop_gradients(worker)
    if not request.keep_rng:
        copies.restore_generators(copy)  # last: loading may draw random numbers
    return copy.nbytes


def _states(runtime: WorkerRuntime) -> dict[str, rank_state.RankState]:
    return rank_state.states_of(runtime.context, runtime.instances, runtime.device)


def _copies(runtime: WorkerRuntime) -> state_copies.StateCopies:
    copies = runtime.context.shared.get("snapshots")
    if copies is None:
        copies = runtime.context.shared["snapshots"] = state_copies.StateCopies(runtime.device)
    return copies


async def _fetched(runtime: WorkerRuntime, ref: BackendRef) -> Any:
    """Fetch a copy. Calls of an asynchronous rank continue during the transfer."""
    if runtime.in_driver or runtime.place is None or not runtime.place.asynchronous:
        return runtime.fetch(ref, FETCH_S)
    return await asyncio.to_thread(runtime.fetch, ref, FETCH_S)
