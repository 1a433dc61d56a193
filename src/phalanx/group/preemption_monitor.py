"""Watches for nodes that will be taken away, and tells groups that have ranks there."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import DrainingNode
from phalanx.group.epoch import GroupState
from phalanx.group.preemption import Seat
from phalanx.session.background import Background

LOOK_EVERY_S = 0.5
_log = logging.getLogger("phalanx")


def seats_of(life: GroupState) -> list[Seat]:
    """Where the ranks of a group are now."""
    return [Seat(one.facts.slot.node_id, one.facts.slot.host) for one in life.epoch.endpoints]


def look_once(life: GroupState) -> None:
    """Note what the cluster says now, for one group; a question of some milliseconds to the cluster."""
    if life.transport.connected():
        known = [*life.transport.going_nodes(), *life.transport.ended_nodes()]
        life.notices.see(known, seats_of(life))


class PreemptionMonitor:
    """One thread per process: it asks the cluster once for all groups, and calls their ``on_notice``.

    It is another one than that which looks after deadlines, so that no function of a user, and no cluster that does
    not answer, can hold that up.
    """

    def __init__(self) -> None:
        self._lives: weakref.WeakSet[GroupState] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._background = Background("phalanx-watchman", self.turn)

    def add(self, life: GroupState) -> None:
        """Watch for a group until it is closed."""
        with self._lock:
            self._lives.add(life)
        self._background.begin()

    def turn(self) -> float | None:
        """Ask the cluster once, and tell the groups."""
        with self._lock:
            lives = [life for life in self._lives if not life.closed]
            self._lives = weakref.WeakSet(lives)
        said: dict[int, Sequence[DrainingNode]] = {}
        for life in lives:
            key = id(life.transport)
            if key not in said:
                said[key] = _going(life.transport)
            if said[key]:
                life.notices.see(said[key], seats_of(life))
            _call(life)
        return LOOK_EVERY_S if lives else None


def _going(transport: Backend) -> Sequence[DrainingNode]:
    try:
        return transport.going_nodes() if transport.connected() else ()
    except Exception:  # of the backend, while it shuts down: the next look tells more
        _log.debug("asking for nodes that go failed", exc_info=True)
        return ()


def _call(life: GroupState) -> None:
    for notice in life.notices.take_uncalled():
        _log.warning("%s", notice)
        if life.on_notice is not None:
            try:
                life.on_notice(notice)
            except Exception:
                _log.exception("on_notice of group %r raised, and the group goes on", life.name)


watchman = PreemptionMonitor()
