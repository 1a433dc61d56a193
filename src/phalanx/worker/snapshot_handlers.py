"""Handlers of snapshots: functions that a driver runs on ranks; see `phalanx.worker.handlers`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.declare.state_declarations import StateDeclared
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


def has_state(host: WorkerRuntime) -> bool:
    """Return whether any role of this rank has a state."""
    declared = StateDeclared.of(host.context).roles
    return any(rank_state.has_state(worker, declared.get(role)) for role, worker in host.instances.items())


def take(host: WorkerRuntime, request: SnapshotRequest) -> SnapshotReply:
    """Copy the state of this rank's roles, and store the part that the holder lacks."""
    copies = _copies(host)
    copy = copies.take(request.number, request.last, _states(host))
    sent = copies.changed(request.number, request.last, copy, again=request.again)
    return SnapshotReply(host.put(sent), copy.nbytes, sent.nbytes)


async def hold(host: WorkerRuntime, copies: Mapping[int, BackendRef], number: int, last: int) -> None:
    """Hold copies of other ranks' states."""
    for rank, ref in copies.items():
        _copies(host).hold(rank, number, last, await _fetched(host, ref))


def give(host: WorkerRuntime, rank: int, number: int) -> BackendRef:
    """Return the copy held for another rank."""
    return host.put(_copies(host).held(rank, number))


def show(host: WorkerRuntime) -> BackendRef:
    """Return a copy of the current state."""
    return host.put(state_copies.copy_state(_states(host)))


async def restore(host: WorkerRuntime, request: RestoreRequest) -> int:
    """Restore a snapshot. Return its bytes."""
    copies = _copies(host)
    if request.copy is not None:
        copies.put_back(request.number, await _fetched(host, request.copy))
    copy = copies.own(request.number)
    states = _states(host)
    for role, saved in copy.roles.items():
        state_copies.restore_role(states[role], saved, role)
    for worker in host.instances.values():
        state_copies.drop_gradients(worker)
    if not request.keep_rng:
        copies.restore_generators(copy)  # last: loading may draw random numbers
    return copy.nbytes


def _states(host: WorkerRuntime) -> dict[str, rank_state.RankState]:
    return rank_state.states_of(host.context, host.instances, host.device)


def _copies(host: WorkerRuntime) -> state_copies.StateCopies:
    copies = host.context.shared.get("snapshots")
    if copies is None:
        copies = host.context.shared["snapshots"] = state_copies.StateCopies(host.device)
    return copies


async def _fetched(host: WorkerRuntime, ref: BackendRef) -> Any:
    """Fetch a copy. Calls of an asynchronous rank continue during the transfer."""
    if host.in_driver or host.place is None or not host.place.asynchronous:
        return host.fetch(ref, FETCH_S)
    return await asyncio.to_thread(host.fetch, ref, FETCH_S)
