"""Ranks that join a group, and ranks that leave it, while the other ranks continue to work.

The ranks of the group work independently. Joining ranks get no calls until they are ready; leaving ranks get no more
calls, and stay until they have finished their calls.
"""

from __future__ import annotations

import contextlib
import time

from phalanx.calls.call import Call
from phalanx.calls.call_state import seconds_until
from phalanx.calls.in_flight import streams_on
from phalanx.calls.run_on import run_on
from phalanx.errors import CallTimeout, GroupBroken, GroupClosed
from phalanx.group.epoch import Epoch, Snapshot
from phalanx.group.group import Group, Resync
from phalanx.group.roster import publish
from phalanx.members.launch import Launched, launch
from phalanx.members.meshes import mesh_of
from phalanx.members.processes import close_workers, constructors, make_again, sent_to, stop
from phalanx.members.recovery import ensure_ready
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
        _finish(core, timeout)  # ranks that were late in the last change
        # If a restart ended these ranks, their slots are still claimed.
        core.pool.unclaim(core.tenant, core.pool.slots[core.world_size :])
        if size > core.world_size:
            _grow(core, size)
        elif size < core.world_size:
            _shrink(core, size)
            _finish(core, timeout)


def _grow(core: Group, size: int) -> None:
    """Add ranks to the group: they get weights, and then calls. After an error the group is unchanged."""
    old, snapshot, ranks = core.epoch, core.snapshot, range(core.world_size, size)
    ground = core.pool.first(size)
    slots = ground.slots[old.size :]
    with contextlib.ExitStack() as undo:
        ground.claim(core.tenant, slots)
        undo.callback(ground.unclaim, core.tenant, slots)
        with constructors(core, ranks) as call:
            kept = dict(enumerate(old.endpoints))
            launched = launch(core, ground, old.number + 1, trace=call.trace, kept=kept)
            undo.callback(_remove, core, launched, old, snapshot)
            epoch = core.change([*old.endpoints, *launched.endpoints], old.size, joining=True)
            sent_to(call, epoch, launched.results)
            call.result(None)
            make_again(core, call.trace, ranks)
            for sync in _syncs_to(core):
                sync.bring(core)
        undo.pop_all()
    core.extras |= launched.extras
    with core.send_lock:
        _tell(core, core.change(core.endpoints, size))


def _remove(core: Group, launched: Launched, old: Epoch, snapshot: Snapshot | None) -> None:
    """End ranks that failed to join, and return to the earlier ranks."""
    stop(core, launched.endpoints)
    core.backend.release(list(launched.extras.values()))
    with contextlib.suppress(GroupClosed, GroupBroken):
        core.change(old.endpoints, old.size)
        core.snapshot = snapshot  # its ranks are the same


def _syncs_to(core: Group) -> set[Resync]:
    """Return the syncs that send weights to joining ranks."""
    return {sync for syncs in core.resyncs().values() for sync in syncs}


def _shrink(core: Group, size: int) -> None:
    tail = range(size, core.world_size)
    if core.backend.immediate:  # an inline stream runs only when it is read
        for stream in streams_on(core, tail):
            stream.run_to_end()
    with core.send_lock:  # earlier calls arrive before the request, and none after it
        epoch = core.change(core.endpoints, size)
        core.leaving = run_on(core, handlers.leave, ranks=tail, title="leave", checked=False)
        _tell(core, epoch)


def _tell(core: Group, epoch: Epoch) -> None:
    """Publish the members for views, and send the new size to each rank, after the rank's earlier calls."""
    publish(core)
    meshes = {name: mesh_of(core, name) for name in core.handle.meshes}
    told = (epoch.number, epoch.size, meshes)
    call = run_on(core, handlers.follow, *told, ranks=epoch.everyone, title="follow", checked=False)
    call.arrivals.disregard()


def _finish(core: Group, timeout: float | None) -> None:
    """Wait ``timeout`` seconds at most for leaving ranks, and end their processes."""
    epoch = core.epoch
    tail = range(epoch.size, len(epoch.endpoints))
    if not tail:
        return
    late = _late(core, epoch, None if timeout is None else core.backend.now() + timeout)
    if late:
        raise CallTimeout(
            f"px.resize({core.name}, {epoch.size}): ranks {late} are still running calls after {timeout:g} s; they "
            "get no new calls, and leave with the next px.resize of the group, which may be the same",
            group=core.name,
            method="px.resize",
            timeout=timeout,
        )
    leavers = epoch.endpoints[epoch.size :]
    close_workers(core, epoch, tail, _LEAVE_PATIENCE_S)
    stop(core, leavers)
    for endpoint in leavers:
        endpoint.retired = True
    core.leaving = None
    if core.closed:
        raise GroupClosed(f"group {core.name!r} was closed while ranks left it", group=core.name)
    _tell(core, core.change(epoch.endpoints[: epoch.size], epoch.size))
    left = [endpoint.slot for endpoint in leavers]
    core.backend.release([core.extras.pop(slot) for slot in left if slot in core.extras])
    core.pool.unclaim(core.tenant, left)


def _late(core: Group, epoch: Epoch, limit: float | None) -> list[int]:
    """Wait until leaving ranks have finished, or until ``limit``; return the ranks that have not finished."""
    tail = range(epoch.size, len(epoch.endpoints))
    streams = streams_on(core, tail)
    while True:
        for stream in streams:
            stream.run_to_end()  # its reader may be the caller that waits here
        left = seconds_until(limit, core.backend)
        late = _at_calls(core, epoch, tail, _LOOKS_EVERY_S if streams else left)
        if not late or (limit is not None and core.backend.now() >= limit):
            return late
        time.sleep(_LOOKS_EVERY_S)


def _at_calls(core: Group, epoch: Epoch, tail: range, seconds: float | None) -> list[int]:
    """Return the leaving ranks that are still running calls after ``seconds``."""
    asked: Call | None = core.leaving
    if asked is not None:
        _, late = asked.arrivals.wait(range(len(tail)), len(tail), seconds)
        if late:
            return [tail[position] for position in late]
    if not core.handle.asynchronous or core.backend.immediate:
        return []  # each rank responded after all of its earlier calls
    statuses = core.backend.inspect(epoch.endpoints[epoch.size :], False)
    return [rank for rank, status in zip(tail, statuses, strict=True) if status.running]
