"""Ranks that join a group, and ranks that leave it, while the other ranks continue to work.

The ranks of the group work independently. Joining ranks get no calls until they are ready; leaving ranks get no more
calls, and stay until they have finished their calls.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from phalanx.backends.backend_types import Endpoint
from phalanx.calls.call_state import Results, limit_after, seconds_until
from phalanx.calls.in_flight import calls_of, streams_on
from phalanx.calls.run_on import run_on
from phalanx.errors import CallTimeout, GroupBroken, GroupClosed
from phalanx.group.epoch import Epoch, Snapshot
from phalanx.group.group import Group, Resync
from phalanx.group.roster import key_of, publish
from phalanx.members.launch import launch
from phalanx.members.meshes import known_meshes
from phalanx.members.processes import close_workers, construct, constructors, stop
from phalanx.members.recovery import ensure_ready
from phalanx.topology.slots import Slot
from phalanx.worker import handlers

_LOOKS_EVERY_S = 0.05
_LEAVE_PATIENCE_S = 65.0  # a rank that leaves hands its items over, for which its channels take 60 s at most


def change_members(core: Group, size: int, timeout: float | None) -> None:
    """Let ranks join or leave, until the group has ``size`` ranks.

    Raises:
        GroupClosed, GroupBroken: if the group takes no calls.
        PlacementError, WorkerInitError, CallTimeout: if ranks could not be started; the group is unchanged.
        CallTimeout: if leaving ranks have not finished after ``timeout`` seconds; they get no calls, and leave with the
            next change.
    """
    if size > core.world_size:
        # Before ``changing`` is held: a recovery of the source locks groups in another order.
        for sync in _syncs_to(core):
            sync.mend_source()
    with core.changing:
        ensure_ready(core)
        core.check()
        if len(core.endpoints) > core.world_size:  # ranks that were late in the last change
            _finish(core, _leave(core), timeout)
        # If a restart ended these ranks, their slots are still claimed.
        _free(core, core.pool.slots[core.world_size :])
        if size > core.world_size:
            _grow(core, size)
        elif size < core.world_size:
            _finish(core, _shrink(core, size), timeout)


def _grow(core: Group, size: int) -> None:
    """Add ranks to the group: they get weights, and then calls. After an error the group is unchanged."""
    old, snapshot, ranks = core.epoch, core.snapshot, range(core.world_size, size)
    core.pool.locate()  # in their final order: a later sort would move ranks
    ground = core.pool.first(size)
    ground.repair(core.options.start_timeout, idle=True)
    slots = ground.slots[old.size :]
    with contextlib.ExitStack() as undo:
        ground.claim(core.tenant, slots)
        undo.callback(_free, core, slots)
        with constructors(core, ranks) as call:
            kept = dict(enumerate(old.endpoints))
            launched = launch(core, ground, old.number + 1, trace=call.trace, kept=kept)
            # The start may have sorted the slots.
            undo.callback(_free, core, [endpoint.slot for endpoint in launched.endpoints])
            undo.callback(_remove, core, launched.endpoints, old, snapshot)
            epoch = core.change([*old.endpoints, *launched.endpoints], old.size, joining=True)
            construct(call, epoch, launched.results, joining=ranks)
            for sync in _syncs_to(core):
                sync.bring(core)
        with core.send_lock:
            epoch = core.change(core.endpoints, size)
            undo.pop_all()
            _tell(core, epoch)


def _free(core: Group, slots: Sequence[Slot]) -> None:
    """Release slots without ranks, and the resources that were reserved in addition to them."""
    core.backend.release([core.extras.pop(slot) for slot in slots if slot in core.extras])
    core.pool.unclaim(core.tenant, slots)


def _remove(core: Group, joining: Sequence[Endpoint], old: Epoch, snapshot: Snapshot | None) -> None:
    """End ranks that failed to join, and return to the earlier ranks."""
    stop(core, joining)
    with contextlib.suppress(GroupClosed, GroupBroken):
        core.change(old.endpoints, old.size)
        core.snapshot = snapshot  # its ranks are the same


def _syncs_to(core: Group) -> set[Resync]:
    """Return the syncs that send weights to joining ranks."""
    return {sync for syncs in core.resyncs().values() for sync in syncs}


def _shrink(core: Group, size: int) -> Results:
    tail = range(size, core.world_size)
    if core.backend.immediate:  # an inline stream runs only when it is read
        for stream in streams_on(core, tail):
            stream.run_to_end()
    with core.send_lock:  # earlier calls arrive before the request, and none after it
        epoch = core.change(core.endpoints, size)
        core.departed.extend(key_of(one.facts) for one in epoch.endpoints[size:])
        asked = _leave(core)
        _tell(core, epoch)
        return asked


def _leave(core: Group) -> Results:
    """Have the ranks beyond the group's size refuse calls; they respond after their earlier calls."""
    tail = range(core.world_size, len(core.endpoints))
    return run_on(core, handlers.leave, ranks=tail, title="leave", checked=False).arrivals


def _tell(core: Group, epoch: Epoch) -> None:
    """Publish the members for views, and send the new size to each rank, after the rank's earlier calls."""
    publish(core)
    told = (epoch.number, epoch.size, known_meshes(core))
    call = run_on(core, handlers.follow, *told, ranks=epoch.everyone, title="follow", checked=False)
    call.arrivals.disregard()


def _finish(core: Group, asked: Results, timeout: float | None) -> None:
    """Wait ``timeout`` seconds at most for leaving ranks, and end their processes."""
    epoch = core.epoch
    tail, leavers = range(epoch.size, len(epoch.endpoints)), epoch.endpoints[epoch.size :]
    if late := _late(core, tail, asked, timeout):
        raise CallTimeout(
            f"px.resize({core.name}, {epoch.size}): ranks {late} are still running calls after {timeout:g} s; they "
            "get no new calls, and leave with the next px.resize of the group, which may be the same",
            group=core.name,
            method="px.resize",
            timeout=timeout,
        )
    for endpoint in leavers:
        endpoint.retired = True
    close_workers(core, epoch, tail, _LEAVE_PATIENCE_S)
    stop(core, leavers)
    if core.closed:
        raise GroupClosed(f"group {core.name!r} was closed while ranks left it", group=core.name)
    _tell(core, core.change(epoch.endpoints[: epoch.size], epoch.size))
    _free(core, [endpoint.slot for endpoint in leavers])


def _late(core: Group, tail: range, asked: Results, timeout: float | None) -> list[int]:
    """Wait ``timeout`` seconds at most until leaving ranks have finished; return the ranks that have not finished."""
    backend, streams = core.backend, streams_on(core, tail)
    limit = limit_after(timeout, backend)
    while True:
        for stream in streams:
            stream.run_to_end()  # its reader may be the caller that waits here
        late = asked.pending(_LOOKS_EVERY_S if streams else seconds_until(limit, backend))
        # An asynchronous rank responds during its earlier calls, even before one arrives, any other rank after them.
        if not late and core.handle.asynchronous and not backend.immediate:
            unfinished = {
                call.plan.ranks[place] for call in calls_of(core) for place in call.arrivals.pending()
            }
            statuses = backend.inspect(core.endpoints[tail.start :], False)
            late = [
                place for place, status in enumerate(statuses) if status.running or tail[place] in unfinished
            ]
        if not late or (limit is not None and backend.now() >= limit):
            return [tail[place] for place in late]
        time.sleep(_LOOKS_EVERY_S)
