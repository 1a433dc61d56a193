"""All groups of this process: what one call needs to know of the others."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import CLUSTER_LEFT
from phalanx.calls.in_flight import InFlightCalls
from phalanx.calls.submitter import Submitter
from phalanx.group.epoch import Epoch, GroupCard, GroupState
from phalanx.session import session as cluster
from phalanx.wire.messages import ProcessInfo


class OpenGroup(Protocol):
    """A group of this process."""

    life: GroupState
    under_way: InFlightCalls
    door: Submitter
    order: threading.RLock


class LiveGroups:
    """The groups that somebody holds."""

    def __init__(self) -> None:
        self._groups: weakref.WeakSet[OpenGroup] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, group: OpenGroup) -> None:
        """Note a group."""
        with self._lock:
            self._groups.add(group)

    def _now(self) -> list[OpenGroup]:
        with self._lock:
            return list(self._groups)

    def owner_of(self, card: GroupCard, processes: Sequence[ProcessInfo]) -> OpenGroup | None:
        """The group of this process itself, of which a view came back to it; None where another one owns it."""
        for group in self._now():
            life = group.life
            if life.owner and life.card.number == card.number and same_processes(life.epoch, processes):
                return group
        return None

    def numbered(self, number: int) -> OpenGroup | None:
        """Return the group of this process with that number; None if there is none."""
        return next((group for group in self._now() if group.life.card.number == number), None)

    def wait_for_a_call(self, seconds: float) -> bool:
        """Wait for a rank to end a call, of any group; False if there is none under way."""
        for group in self._now():
            for call in group.under_way.calls():
                everyone = range(len(call.plan.ranks))
                pending = call.arrivals.wait(everyone, len(everyone), 0)[1]
                if pending:
                    call.arrivals.wait(pending, 1, seconds)
                    return True
        return False

    def _open(self, transport: Backend | None) -> list[GroupState]:
        lives = [group.life for group in self._now()]
        return [life for life in lives if transport in (None, life.transport) and not life.closed]

    def note_left(self, transport: Backend | None) -> None:
        """Note why the groups of a backend, or all that this process owns, will be closed."""
        for life in self._open(transport):
            if transport is not None or life.owner:
                life.lifecycle.closed_because = CLUSTER_LEFT

    def close_left(self, transport: Backend | None) -> None:
        """Close, here, the groups of a backend that nobody has closed: they belong to others, or outlive it."""
        for life in self._open(transport) if transport is not None else ():
            life.on_change = None  # whoever they belong to publishes what becomes of them
            life.begin_close()
            life.finish_close()


def same_processes(epoch: Epoch, processes: Sequence[ProcessInfo]) -> bool:
    """Whether these are the ranks of an epoch, by what they reported: process ids, and when."""
    return [(e.facts.pid, e.facts.started) for e in epoch.endpoints] == [
        (f.pid, f.started) for f in processes
    ]


open_groups = LiveGroups()
cluster.at_letting_go(cluster.Step.NOTE, open_groups.note_left)
cluster.at_letting_go(cluster.Step.FORGET, open_groups.close_left)
