"""Checks of open groups by the monitor: deadlines, stalls, and ranks that died between calls.

A check takes some microseconds per group while no rank has failed: it reads cached state of the backend.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from phalanx.calls.call import Call
from phalanx.calls.diagnosis import outcome_when_late, place_of, report_of_death
from phalanx.calls.in_flight import calls_of
from phalanx.collect.failures import combine
from phalanx.errors import WorkerDiedError
from phalanx.group.epoch import Epoch
from phalanx.group.group import Group
from phalanx.group.lifecycle import State
from phalanx.session.background import Background, monitor_thread
from phalanx.session.session import session

LOOK_EVERY_S = 0.25
_log = logging.getLogger("phalanx")


def turn() -> float | None:
    """Check each open group once. Return the seconds until the next turn, if any."""
    groups: list[Group] = [one for one in session.groups() if not one.closed and not one.backend.immediate]
    found = bool(groups)
    while groups:
        check(groups.pop())  # so that the group is not kept alive beyond its check
    return LOOK_EVERY_S if found else None


def check(group: Group) -> None:
    """Check a group, and whether its cluster is still connected."""
    try:
        if group.backend.connected():
            look_after(group)
        else:
            session.lost(group.backend)
    except Exception:  # the backend is shutting down: the next check, or the next call, reports it
        _log.debug("looking after group %r failed", group.name, exc_info=True)


def look_after(group: Group) -> None:
    """End the calls of a group whose deadline has passed, report stalled calls, and find lost ranks."""
    epoch = group.epoch
    calls = [call for call in calls_of(group) if epoch.has_kept(call.plan.ranks, call.epoch)]
    now = group.backend.now()
    for call in calls:
        if call.deadline is not None and now >= call.deadline:
            if call.all_ended():  # its result waits for its caller
                group.forget(call)
            else:
                call.conclude_now()
        elif call.stall_at is not None and now >= call.stall_at:
            _report_stall(call)
    if group.owner and group.lifecycle.state is State.READY and (dead := epoch.dead(group.backend)):
        # The error of a call in which a rank died says more than the death alone, so such calls end first.
        failed = [call for call in calls if call.touches(dead)]
        for call in failed:
            call.conclude_now()
        if not failed:
            _lost(group, epoch, dead)


def _lost(group: Group, epoch: Epoch, dead: Sequence[int]) -> None:
    """Break the group because some ranks died between calls."""
    method, members = "(between calls)", {rank: epoch.endpoints[rank] for rank in dead}
    reports = [
        report_of_death(group.backend, endpoint, place_of(endpoint, rank, "", method))
        for rank, endpoint in members.items()
    ]
    error = combine(group.name, method, reports)
    if isinstance(error, WorkerDiedError) and not group.closed:
        group.broken(error, epoch)


def _report_stall(call: Call) -> None:
    """Log the state of each rank of a call that takes longer than it should; the call continues."""
    now = call.core.backend.now()
    error = outcome_when_late(call, call.started + round(now - call.started, 1)).error
    call.stall_at = None if error is None else now + (call.stall_after or 0.0)
    if error is not None:
        _log.warning("stalled, still running: %s", error)


checks = Background(turn, thread=monitor_thread, first_after=LOOK_EVERY_S)
"""Checks groups on the monitor thread, until no group of this process is open."""
