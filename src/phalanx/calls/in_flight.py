"""The in-flight calls of a group.

A call is forgotten if its future is dropped. However, a call to *any* rank counts until it has ended, so that such
calls go to all ranks in turn even if their futures are dropped.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Sequence

from phalanx.calls.call import Call
from phalanx.calls.streams import PendingStream
from phalanx.group.epoch import Epoch
from phalanx.group.group import Group
from phalanx.session.session import session

_MOST_CHOSEN = 256


def calls_of(group: Group) -> list[Call]:
    """Return the live calls that are not over."""
    found: list[Call | None] = [reference() for reference in list(group.recent)]
    return [call for call in found if call is not None and not call.over]


def is_busy(group: Group) -> bool:
    """Return whether a call of this process is still at work."""
    return any(not call.all_ended() for call in calls_of(group))


def add_chosen(group: Group, call: Call) -> None:
    """Note a call whose rank was chosen for having the fewest."""
    if len(group.chosen) >= _MOST_CHOSEN:
        _chosen_of(group, None)
    with group.calls_lock:
        group.chosen[call.number] = (call.epoch, call.plan.ranks, call.arrivals)


def add_stream(group: Group, call: Call) -> None:
    """Note a call whose ranks wait for its reader."""
    with group.calls_lock:
        there = [one for one in group.streams if (known := one()) is not None and not known.over]
        group.streams = [*there, weakref.ref(call)]


def streams_on(group: Group, ranks: Sequence[int]) -> list[PendingStream]:
    """Return the items of calls at which some of these ranks are, and may wait for a reader."""
    calls: list[Call | None] = [reference() for reference in group.streams]
    return [
        call.streams
        for call in calls
        if call is not None
        and call.streams is not None
        and not call.over
        and not call.streams.left
        and not set(call.plan.ranks).isdisjoint(ranks)
    ]


def make_room(group: Group) -> None:
    """Wait for the oldest call where as many are in flight as the group may have."""
    streams: list[weakref.ref[Call]] = []  # these may wait until the caller reads on
    while len(group.recent) + len(streams) >= group.max_in_flight and group.recent:
        with contextlib.suppress(IndexError):  # another thread was faster
            reference = group.recent.popleft()
            oldest: Call | None = reference()
            if oldest is None or oldest.over:
                continue
            if oldest.streams is not None:
                streams.append(reference)
                continue
            everyone = range(len(oldest.plan.ranks))
            oldest.arrivals.wait(everyone, len(everyone), None)
    group.recent.extendleft(reversed(streams))


def wait_for_any(seconds: float) -> bool:
    """Wait for a rank to end a call, of any group of this process. Return False if none is in flight."""
    for group in session.groups():
        for call in calls_of(group):
            everyone = range(len(call.plan.ranks))
            pending = call.arrivals.wait(everyone, len(everyone), 0)[1]
            if pending:
                call.arrivals.wait(pending, 1, seconds)
                return True
    return False


def least_busy(group: Group, sets: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the set of ranks with the fewest calls in flight; the first of equal ones."""
    busy = _busy(group)
    return min(sets, key=lambda ranks: sum(busy[rank] for rank in ranks))


def loads(group: Group) -> dict[int, int]:
    """Return how many calls are in flight on each rank that lives."""
    dead, busy = group.epoch.dead(group.backend), _busy(group)
    return {rank: busy[rank] for rank in range(group.world_size) if rank not in dead}


def _busy(group: Group) -> Counter[int]:
    epoch = group.epoch
    busy: Counter[int] = Counter()
    chosen = _chosen_of(group, epoch)
    for called in chosen.values():
        busy.update(called)
    for call in calls_of(group):
        if call.number not in chosen and epoch.takes(call.plan.ranks, call.epoch):
            if call.all_ended():
                _forget(group, call)
            else:
                busy.update(call.plan.ranks)
    return busy


def _chosen_of(group: Group, epoch: Epoch | None) -> dict[int, Sequence[int]]:
    """The ranks of each chosen call that has not ended, by number; forgets the others."""
    with group.calls_lock:
        known = dict(group.chosen)
    in_flight: dict[int, Sequence[int]] = {}
    for number, (since, ranks, results) in known.items():
        stale = epoch is not None and not epoch.takes(ranks, since)
        if stale or results.all_ended():
            with group.calls_lock:
                group.chosen.pop(number, None)
        else:
            in_flight[number] = ranks
    return in_flight


def _forget(group: Group, call: Call) -> None:
    """Forget a call that has ended on all its ranks: it needs no capacity, whether or not its value was read."""
    for reference in list(group.recent):
        if reference() is call:
            with contextlib.suppress(ValueError):
                group.recent.remove(reference)
