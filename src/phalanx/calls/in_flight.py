"""The calls of a group that nobody has seen the end of."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter, deque
from collections.abc import Sequence

from phalanx.calls.call import Call
from phalanx.calls.listeners import CallInfo, CallListener
from phalanx.calls.streams import PendingStream
from phalanx.calls.submitter import PendingResults
from phalanx.group.epoch import Epoch

_MOST_CHOSEN = 256


class InFlightCalls(CallListener):
    """Bounds how many calls are under way, and knows which rank has the fewest.

    A call whose future nobody keeps is forgotten with it; but one that was to go to *any* rank counts until it has
    ended, so that calls whose futures are not kept go to all ranks in turn.
    """

    def __init__(self) -> None:
        #: Those that were sent, the oldest first; whoever sends one appends it.
        self.recent: deque[weakref.ref[Call]] = deque()
        self._chosen: dict[int, tuple[Epoch, Sequence[int], PendingResults]] = {}
        self._lock = threading.RLock()  # the collector may end a call while it is held
        self._streams: list[weakref.ref[Call]] = []

    def add_chosen(self, call: Call) -> None:
        """Note a call whose rank was chosen for having the fewest."""
        if len(self._chosen) >= _MOST_CHOSEN:
            self._chosen_of(None)
        with self._lock:
            self._chosen[call.number] = (call.epoch, call.plan.ranks, call.arrivals)

    def ended(self, call: CallInfo, error: BaseException | None) -> None:
        """Its outputs are let go of."""
        if self._chosen:
            with self._lock:
                self._chosen.pop(call.number, None)

    def add_stream(self, call: Call) -> None:
        """Note a call whose ranks wait for its reader."""
        with self._lock:
            there = [one for one in self._streams if (known := one()) is not None and not known.over]
            self._streams = [*there, weakref.ref(call)]

    def streams_on(self, ranks: Sequence[int]) -> list[PendingStream]:
        """What comes of streams at which some of these ranks are, and may wait for a reader."""
        calls = (reference() for reference in self._streams)
        return [
            call.streams
            for call in calls
            if call is not None
            and call.streams is not None
            and not call.over
            and not call.streams.left
            and not set(call.plan.ranks).isdisjoint(ranks)
        ]

    def calls(self) -> list[Call]:
        """Those that somebody holds."""
        found = (reference() for reference in list(self.recent))
        return [call for call in found if call is not None and not call.over]

    def make_room(self, most: int) -> None:
        """Wait for the oldest call where ``most`` are under way."""
        streams: list[weakref.ref[Call]] = []  # which may wait for whoever makes this call to read on
        while len(self.recent) + len(streams) >= most and self.recent:
            with contextlib.suppress(IndexError):  # another thread was faster
                reference = self.recent.popleft()
                oldest = reference()
                if oldest is None or oldest.over:
                    continue
                if oldest.streams is not None:
                    streams.append(reference)
                    continue
                everyone = range(len(oldest.plan.ranks))
                oldest.arrivals.wait(everyone, len(everyone), None)
        self.recent.extendleft(reversed(streams))

    def least_busy(self, epoch: Epoch, sets: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The set of ranks with the fewest calls under way; the first of equal ones."""
        busy = self.loads(epoch)
        return min(sets, key=lambda ranks: sum(busy[rank] for rank in ranks))

    def loads(self, epoch: Epoch) -> Counter[int]:
        """How many calls are under way on each rank that has any."""
        busy: Counter[int] = Counter()
        chosen = self._chosen_of(epoch)
        for called in chosen.values():
            busy.update(called)
        for call in self.calls():
            if call.number not in chosen and epoch.takes(call.plan.ranks, call.epoch):
                if call.all_ended():
                    self._forget(call)
                else:
                    busy.update(call.plan.ranks)
        return busy

    def _chosen_of(self, epoch: Epoch | None) -> dict[int, Sequence[int]]:
        """The ranks of each chosen call that has not ended, by number; forgets the others."""
        with self._lock:
            known = dict(self._chosen)
        under_way: dict[int, Sequence[int]] = {}
        for number, (since, ranks, arrivals) in known.items():
            stale = epoch is not None and not epoch.takes(ranks, since)
            if stale or arrivals.all_ended():
                with self._lock:
                    self._chosen.pop(number, None)
            else:
                under_way[number] = ranks
        return under_way

    def _forget(self, call: Call) -> None:
        """A call that has ended on all its ranks needs no room, whether or not somebody has asked for its value."""
        for reference in list(self.recent):
            if reference() is call:
                with contextlib.suppress(ValueError):
                    self.recent.remove(reference)

    def busy(self) -> bool:
        """Whether a call of this process is still at work."""
        return any(not call.all_ended() for call in self.calls())
