"""What the monitor does for a group while nobody may be waiting for its calls."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from phalanx.calls.call import Call
from phalanx.calls.failure_diagnosis import late_now
from phalanx.calls.in_flight import InFlightCalls
from phalanx.calls.rank_monitor import RankMonitor
from phalanx.calls.submitter import DirectArrivals
from phalanx.collect.failures import combine
from phalanx.errors import WorkerDiedError
from phalanx.group.epoch import Epoch, GroupState
from phalanx.group.lifecycle import State

_log = logging.getLogger("phalanx")


def look_after(life: GroupState, under_way: InFlightCalls) -> None:
    """End calls of a group whose deadline is over, report stalls, and find lost ranks."""
    epoch = life.epoch
    calls = [call for call in under_way.calls() if epoch.has_kept(call.plan.ranks, call.epoch)]
    now = life.transport.now()
    for call in calls:
        if call.deadline is not None and now >= call.deadline:
            call.conclude_now()
        elif call.stall_at is not None and now >= call.stall_at:
            _report_stall(call)
    if life.owner and life.lifecycle.state is State.READY and (dead := epoch.dead(life.transport)):
        # A call that a rank died in tells more than the death alone: its own watch finds out first.
        failed = [call for call in calls if call.touches(dead)]
        for call in failed:
            call.conclude_now()
        if not failed:
            _lost(life, epoch, dead)


def seen_gone(life: GroupState) -> list[int]:
    """The ranks that are gone as the backend knows, or as a look at their processes tells, which may be sooner."""
    transport, epoch = life.transport, life.epoch
    dead = set(transport.dead_of(epoch.endpoints))
    ranks = [rank for rank in epoch.everyone[: len(epoch.endpoints)] if rank not in dead]
    sights = transport.sights([epoch.endpoints[rank] for rank in ranks], False) if ranks else []
    gone = {rank for rank, sight in zip(ranks, sights, strict=True) if sight.gone}
    return sorted(gone | {rank for rank in dead if rank < epoch.size})


def _lost(life: GroupState, epoch: Epoch, dead: Sequence[int]) -> None:
    """Break the group: some ranks died while nobody called them."""
    watch = RankMonitor(
        transport=life.transport,
        group=life.name,
        method="(between calls)",
        role="",
        ranks=range(epoch.size),
        endpoints=epoch.endpoints,
        arrivals=DirectArrivals(life.transport, ()),
        grace_s=0.0,
        started=life.transport.now(),
    )
    error = combine(life.name, watch.method, [watch.dead(rank) for rank in dead])
    if isinstance(error, WorkerDiedError) and not life.closed:
        life.broken(error, epoch)


def _report_stall(call: Call) -> None:
    """Log where each rank is at a call that takes longer than it should, and let it go on."""
    ending = late_now(call)
    if ending.error is None:
        call.stall_at = None
        return
    call.stall_at = call.life.transport.now() + (call.stall_after or 0.0)
    _log.warning("stalled, still running: %s", ending.error)
