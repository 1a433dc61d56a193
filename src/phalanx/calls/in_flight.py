"""The in-flight calls of a group.

A call is forgotten once its future is dropped. However, a call to *any* rank counts until it has ended, so that such
calls are spread over all ranks even if their futures are dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from phalanx.calls.call import Call
from phalanx.calls.call_state import PendingStream
from phalanx.group.group import Group

_LOOKS_AGAIN_S = 0.02


def calls_of(group: Group) -> list[Call]:
    """Return the calls that are not over, in order of sending."""
    found: list[Call | None] = [reference() for reference in group.recent.valuerefs()]
    return [call for call in found if call is not None and not call.over]


def is_busy(group: Group) -> bool:
    """Return whether a rank is still running a call of this process."""
    return any(not call.all_ended() for call in calls_of(group))


def streams_on(group: Group, ranks: Sequence[int]) -> list[PendingStream]:
    """Return the streams of calls in which some of these ranks may be waiting for a reader."""
    streams = [call.streams for call in calls_of(group) if not set(call.plan.ranks).isdisjoint(ranks)]
    return [one for one in streams if one is not None and one.streaming.buffer is not None and not one.left]


def make_room(group: Group) -> None:
    """Forget calls that have ended. If the group's limit of calls in flight is reached, wait until a call ends."""
    while len(group.recent) >= group.max_in_flight:
        # Wait for the oldest call, which probably ends next, and only check the others.
        patience, is_full = _LOOKS_AGAIN_S, False
        for call in calls_of(group):
            if len(group.recent) < group.max_in_flight:
                return
            if call.streams is not None:  # it may not end before the caller reads on
                continue
            if call.arrivals.pending(patience):
                patience, is_full = 0.0, True
            else:
                group.forget(call)
        if not is_full:  # only streams are left
            return


def loads(group: Group) -> Counter[int]:
    """Return the number of calls in flight on each rank."""
    busy = Counter[int]()
    for call in calls_of(group):
        if not group.epoch.takes(call.plan.ranks, call.epoch):
            group.chosen.discard(call)
        elif not call.all_ended():
            busy.update(call.plan.ranks)
        else:  # it does not count, even if its value was not read yet
            group.forget(call)
    return busy
