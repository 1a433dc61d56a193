"""Replacement of ranks: some ranks get new processes, the others stay; see ``px.replace_ranks``.

The new ranks are constructed while the others run ``rejoin()``. Then states are restored, and weights synced.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from phalanx.backends.backend_types import Endpoint
from phalanx.calls.run_on import outputs_on, run_on
from phalanx.errors import CallError, GroupBroken, PhalanxError, WorkerDiedError
from phalanx.group.epoch import Epoch, Snapshot
from phalanx.group.group import Group, Resync
from phalanx.group.lifecycle import State, first_line
from phalanx.group.preemption_notices import look_once
from phalanx.group.roster import publish
from phalanx.members.launch import launch
from phalanx.members.processes import construct, constructors, new_ranks, stop
from phalanx.members.snapshots import lost_copies, take_together
from phalanx.wire.messages import STORE_VARIABLE
from phalanx.worker import handlers

#: Variables by which ranks find each other, sent again to ranks that rejoin.
_MEETING = ("MASTER_ADDR", "MASTER_PORT", STORE_VARIABLE)
_RESTORED_WITHIN_S = 300.0
_ANSWER_S = 1.0
_INTERRUPTED_S = 1.0
_log = logging.getLogger("phalanx")


def lost_ranks(core: Group) -> Sequence[int]:
    """Return the ranks that died; all ranks, if the epoch has no processes.

    These include the ranks that the group's failure names as dead, and ranks that an inspection finds dead: the backend
    may learn of a loss late, above all of the loss of a node.
    """
    backend, epoch = core.backend, core.epoch
    endpoints = epoch.endpoints[: epoch.size]
    if not endpoints:
        return range(epoch.size)
    gone = set(backend.dead_of(endpoints))
    living = [rank for rank in range(len(endpoints)) if rank not in gone]
    statuses = backend.inspect([endpoints[rank] for rank in living], False)
    gone.update(rank for rank, status in zip(living, statuses, strict=True) if status.gone)
    if core.lifecycle.state is State.BROKEN and isinstance(core.lifecycle.cause, CallError):
        died = {one.rank: one for one in core.lifecycle.cause.failures if one.kind == "died"}
        named = [rank for rank in died if rank < len(endpoints)]
        lost_nodes = {epoch.nodes[rank] for rank in named if died[rank].exit == "node lost"}
        gone.update(named, (rank for rank in range(len(endpoints)) if epoch.nodes[rank] in lost_nodes))
    return sorted(gone)


def replace_lost_ranks(core: Group, ranks: Sequence[int], state: str) -> tuple[int, ...]:
    """Replace ranks of a group that this process owns, and restore states; see ``px.replace_ranks``.

    Ranks on draining nodes are replaced too, since their slots move: no process is started on such nodes.

    Returns:
        The ranks that were replaced.

    Raises:
        GroupBroken: if no rank has a copy of the state of a lost rank; the group is unchanged.
        Errors of the constructors and of ``rejoin()``: if one of them fails.
    """
    look_once(core)
    going = core.notices.ranks_to_move(core.epoch.nodes)
    gone = tuple(sorted({*ranks, *going}))
    if len(gone) == core.world_size and (state != "none" or not core.endpoints):
        raise GroupBroken(
            f"px.replace_ranks({core.name}): all {core.world_size} ranks are to be replaced, so no rank keeps their "
            "state. restart() recreates them; px.load loads a saved step",
            group=core.name,
            cause=core.lifecycle.cause,
        )
    snapshot = _complete_snapshot(core, gone) if state == "snapshot" else None
    left = core.begin_restart(gone=gone)
    with new_ranks(core, "be given new ranks", lambda: _undo(core, left)):
        _start_replacements(core, left, gone)
        if snapshot is not None:
            _restore(core, snapshot, gone)
        elif state == "peer":
            _copy_from_peer(core, gone)
        _resync_weights(core, gone)
        core.started()
    try:
        if snapshot is None:
            core.snapshot = None  # the new ranks are not in it
        else:
            # A new snapshot has a second copy of each state again. Until then, some states have none.
            core.snapshot = snapshot.without(gone)
            # A rank that is lost now is handled like a rank that is lost right after the replacement.
            with contextlib.suppress(GroupBroken, WorkerDiedError):
                take_together([core])
    finally:  # last: calls of views would reach some ranks before the snapshot, others after it
        publish(core)
    return gone


def _complete_snapshot(core: Group, gone: Collection[int]) -> Snapshot:
    """Return the snapshot that a group can be restored to without the processes of ``gone`` ranks.

    Raises:
        GroupBroken: if there is no snapshot, or the copies of some states were lost with their holders.
    """
    snapshot = core.snapshot
    if snapshot is None:
        raise GroupBroken(
            f"px.replace_ranks({core.name}): there is no snapshot of the group, so that the state of "
            f"ranks {sorted(gone)} "
            "is lost. Call px.snapshot(group) after a step; or say state='peer' where all ranks have the same state, "
            "state='none' where they need none; or restart() and load a saved step",
            group=core.name,
            cause=core.lifecycle.cause,
        )
    lost = lost_copies(snapshot.holders, gone)
    if lost:
        told = ", ".join(f"of rank {rank} (held by rank {snapshot.holders[rank]})" for rank in lost)
        raise GroupBroken(
            f"px.replace_ranks({core.name}): snapshot {snapshot.number} cannot be restored: the only other copy of the "
            f"state {told} is lost too. restart() recreates all ranks; px.load loads a saved step",
            group=core.name,
            cause=core.lifecycle.cause,
        )
    return snapshot


def _start_replacements(core: Group, left: Epoch, gone: Collection[int]) -> None:
    """Start processes for the ``gone`` ranks of the epoch ``left``, while the other ranks run ``rejoin()``."""
    members = left.endpoints[: left.size]
    stop(core, [left.endpoints[rank] for rank in gone] + list(left.endpoints[left.size :]))
    ground = core.pool.first(left.size)
    ground.repair(core.options.start_timeout)
    staying = {rank: endpoint for rank, endpoint in enumerate(members) if rank not in gone}
    places = [endpoint.slot for endpoint in members]
    # Extra resources of slots that moved are on the old node: the launch reserves them on the new one.
    nodes = zip(places, left.nodes, ground.nodes_of(places), strict=True)
    moved = [slot for slot, before, now in nodes if before != now and slot in core.extras]
    core.backend.release([*map(core.extras.pop, moved)])
    with constructors(core) as call:
        launched = launch(core, ground, call.epoch.number, trace=call.trace, kept=staying, places=places)
        new = dict(zip(sorted(gone), launched.endpoints, strict=True))
        epoch = core.enter([{**staying, **new}[rank] for rank in range(left.size)])
        environment = launched.configs[0].environment
        meeting = {name: environment[name] for name in _MEETING}
        rejoin = run_on(core, handlers.rejoin, epoch.number, meeting, ranks=list(staying), checked=False)
        results = dict(zip(new, launched.results, strict=True))
        results |= {rank: rejoin.arrivals.reference(place) for place, rank in enumerate(staying)}
        construct(call, epoch, [results[rank] for rank in range(left.size)])


def _restore(core: Group, snapshot: Snapshot, new: Collection[int]) -> None:
    """Restore all ranks to a snapshot: ``new`` ranks from the copies of their holders."""
    copies = {
        rank: _output(core, snapshot.holders[rank], handlers.give_copy, rank, snapshot.number) for rank in new
    }
    everyone = range(core.world_size)
    _run(core, everyone, handlers.restore_snapshot, snapshot.number, each=[*map(copies.get, everyone)])


def _copy_from_peer(core: Group, new: Collection[int]) -> None:
    """Copy the state of a rank that stayed to the ``new`` ranks."""
    peer = next(rank for rank in range(core.world_size) if rank not in new)
    copy = _output(core, peer, handlers.copy_of_now)
    _run(core, sorted(new), handlers.restore_snapshot, 0, each=[copy] * len(new))


def _output(core: Group, rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function on a rank during a replacement; return its output as an argument, which stays on the rank."""
    (output,) = outputs_on(core, function, *args, ranks=[rank])
    _run(core, [rank], handlers.meet)  # the error of a lost rank names it
    return output


def _run(core: Group, ranks: Sequence[int], function: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Run a function on ranks during a replacement.

    Raises:
        CallTimeout: if a rank has not returned within 300 s.
        RemoteCallError, WorkerDiedError: if a rank failed, or was lost.
    """
    call = run_on(core, function, *args, ranks=ranks, title="px.replace_ranks", checked=False, **options)
    call.result(_RESTORED_WITHIN_S)


def _resync_weights(core: Group, new: Collection[int]) -> None:
    """Sync weights to all ranks of a group with ``new`` ranks.

    If a sync is impossible or fails, the group continues, and the new ranks refuse methods that need weights.

    Raises:
        PhalanxError: if the group lost a rank during the sync.
    """
    failures: dict[Resync, str] = {}
    for (role, name), syncs in core.resyncs().items():
        why = "" if syncs else "no px.WeightSync that sent them exists any more"
        for sync in syncs:
            if sync not in failures:
                failures[sync] = sync.doubt() or _resync_failure(core, sync)
            why = why or failures[sync]
        if why:
            _log.warning(
                "group %r: ranks %s are new, and did not receive weights %r%s: %s. They refuse methods that need them "
                "unless their state was restored with them; sync them once the source has the right weights",
                core.name,
                sorted(new),
                name,
                f" of role {role!r}" if role else "",
                why,
            )


def _resync_failure(core: Group, sync: Resync) -> str:
    """Sync weights; return the reason of a failure as text, "" if there was none."""
    try:
        with core.preparing():
            sync.bring(core)
    except PhalanxError as error:
        if core.lifecycle.state is not State.RESTARTING:
            raise  # the replacement itself has failed
        return f"their sync failed: {first_line(error)}"
    return ""


def _undo(core: Group, left: Epoch) -> None:
    """End the new processes of a failed replacement, and make the other ranks ready for another try."""
    started = [endpoint for endpoint in core.endpoints if endpoint not in left.endpoints]
    if not core.endpoints:  # ranks that stay are members again, for another try or to be ended
        core.enter(left.endpoints[: left.size])
    core.backend.kill(started)
    settle(core, left.endpoints)


def settle(core: Group, staying: Sequence[Endpoint]) -> None:
    """Make the ``staying`` ranks of the present epoch ready for the next change.

    Their calls are interrupted, and their collectives are aborted, since a rank that waits in a collective for a rank
    that never joins would wait for ever. Ranks that do not react are stopped, and count as lost.
    """
    backend, endpoints = core.backend, core.endpoints
    if core.closed or backend.immediate or not backend.connected():
        return  # close() ends them all
    dead = backend.dead_of(endpoints)
    ranks = [rank for rank, one in enumerate(endpoints) if one in staying and rank not in dead]
    if not ranks:
        return
    results = run_on(core, handlers.meet, ranks=ranks, title="settle", checked=False).arrivals

    def late(seconds: float) -> list[Endpoint]:
        return [endpoints[ranks[position]] for position in results.pending(seconds)]

    busy = late(_ANSWER_S)
    for endpoint, status in zip(busy, backend.inspect(busy, False), strict=True):
        for call in status.running:
            backend.cancel([endpoint], [call])
    if busy and (busy := late(_INTERRUPTED_S)):
        backend.sever(busy)
        busy = late(_INTERRUPTED_S)
    backend.kill(busy)
