"""The in-flight calls of a group.

A call is forgotten once its future is dropped. However, a call to *any* rank counts until it has ended, so that such
calls are spread over all ranks even if their futures are dropped.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence

from phalanx.calls.call import Call
from phalanx.calls.call_state import PendingStream
from phalanx.group.epoch import Epoch
from phalanx.group.group import Group
from phalanx.session.session import session

_MOST_CHOSEN = 256
_LOOKS_AGAIN_S = 0.02


def calls_of(group: Group) -> list[Call]:
    """Return the calls that are not over and whose futures are still referenced."""
    found: list[Call | None] = [reference() for reference in list(group.recent)]
    return [call for call in found if call is not None and not call.over]


def is_busy(group: Group) -> bool:
    """Return whether a rank is still running a call of this process."""
    return any(not call.all_ended() for call in calls_of(group))


def add_chosen(group: Group, call: Call) -> None:
    """Record a call whose ranks were chosen as the least busy."""
    if len(group.chosen) >= _MOST_CHOSEN:
        _chosen_of(group, None)
    group.chosen[call.number] = (call.epoch, call.plan.ranks, call.arrivals)


def streams_on(group: Group, ranks: Sequence[int]) -> list[PendingStream]:
    """Return the streams of calls in which some of these ranks may be waiting for a reader."""
    streams = [call.streams for call in calls_of(group) if not set(call.plan.ranks).isdisjoint(ranks)]
    return [one for one in streams if one is not None and one.streaming.buffer is not None and not one.left]


def make_room(group: Group) -> None:
    """Forget calls that have ended. If the group's limit of calls in flight is reached, wait until a call ends."""
    while len(group.recent) >= group.max_in_flight:
        # Wait for the oldest call, which probably ends next, and only check the others.
        patience, is_full = _LOOKS_AGAIN_S, False
        for reference in list(group.recent):
            call: Call | None = reference()
            if call is not None and not call.over:
                if len(group.recent) < group.max_in_flight:
                    return
                if call.streams is not None:  # it may not end before the caller reads on
                    continue
                if call.arrivals.pending(patience):
                    patience, is_full = 0.0, True
                    continue
            with contextlib.suppress(ValueError, IndexError):  # another thread was faster
                group.recent.remove(reference)
        if not is_full:  # only streams are left
            return


def wait_for_any(seconds: float) -> bool:
    """Wait ``seconds`` at most for a rank to end a call of this process. Return False if no call is in flight."""
    for group in session.groups():
        for call in calls_of(group):
            if pending := call.arrivals.pending():
                call.arrivals.wait(pending, 1, seconds)
                return True
    return False


def least_busy(group: Group, sets: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the set of ranks with the fewest calls in flight; the first of equal ones."""
    busy = _busy(group)
    return min(sets, key=lambda ranks: sum(busy[rank] for rank in ranks))


def loads(group: Group) -> dict[int, int]:
    """Return the number of calls in flight on each living rank."""
    dead, busy = group.epoch.dead(group.backend), _busy(group)
    return {rank: busy[rank] for rank in range(group.world_size) if rank not in dead}


def _busy(group: Group) -> Counter[int]:
    epoch = group.epoch
    chosen = _chosen_of(group, epoch)
    busy = Counter(rank for ranks in chosen.values() for rank in ranks)
    for reference in list(group.recent):
        call: Call | None = reference()
        if call is None or call.over or call.number in chosen or not epoch.takes(call.plan.ranks, call.epoch):
            continue
        if not call.all_ended():
            busy.update(call.plan.ranks)
        else:  # it does not count, even if its value was not read yet
            with contextlib.suppress(ValueError):
                group.recent.remove(reference)
    return busy


def _chosen_of(group: Group, epoch: Epoch | None) -> dict[int, Sequence[int]]:
    """Return the ranks of each chosen call that has not ended, by number. Forget the other calls."""
    in_flight: dict[int, Sequence[int]] = {}
    for number, (since, ranks, results) in dict(group.chosen).items():
        if (epoch is None or epoch.takes(ranks, since)) and not results.all_ended():
            in_flight[number] = ranks
        else:
            group.chosen.pop(number, None)
    return in_flight
