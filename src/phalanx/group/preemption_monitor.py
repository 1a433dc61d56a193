"""Watches for nodes that will be drained, and notifies groups that have ranks there."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import DrainingNode
from phalanx.group.group import Group
from phalanx.group.preemption_notices import Seat
from phalanx.session.background import Background

LOOK_EVERY_S = 0.5
_log = logging.getLogger("phalanx")


def seats_of(group: Group) -> list[Seat]:
    """Where the ranks of a group are now."""
    return [Seat(one.facts.slot.node_id, one.facts.slot.host) for one in group.epoch.endpoints]


def look_once(group: Group) -> None:
    """Record the draining nodes for a group; queries the cluster, which takes some milliseconds."""
    if group.backend.connected():
        known = [*group.backend.going_nodes(), *group.backend.ended_nodes()]
        group.notices.see(known, seats_of(group))


class PreemptionMonitor:
    """Asks the cluster once for all groups, and calls their ``on_notice``."""

    def __init__(self) -> None:
        self._groups: weakref.WeakSet[Group] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._background = Background(self.turn)

    def add(self, group: Group) -> None:
        """Watch for a group until it is closed."""
        with self._lock:
            self._groups.add(group)
        self._background.begin()

    def turn(self) -> float | None:
        """Query the cluster once, and notify the groups."""
        with self._lock:
            groups = [group for group in self._groups if not group.closed]
            self._groups = weakref.WeakSet(groups)
        said: dict[int, Sequence[DrainingNode]] = {}
        for group in groups:
            key = id(group.backend)
            if key not in said:
                said[key] = _going(group.backend)
            if said[key]:
                group.notices.see(said[key], seats_of(group))
            _call(group)
        return LOOK_EVERY_S if groups else None


def _going(backend: Backend) -> Sequence[DrainingNode]:
    try:
        return backend.going_nodes() if backend.connected() else ()
    except Exception:  # of the backend, while it shuts down: the next look tells more
        _log.debug("asking for nodes that go failed", exc_info=True)
        return ()


def _call(group: Group) -> None:
    for notice in group.notices.take_uncalled():
        _log.warning("%s", notice)
        if group.options.on_notice is not None:
            try:
                group.options.on_notice(notice)
            except Exception:
                _log.exception("on_notice of group %r raised, and the group goes on", group.name)


watchman = PreemptionMonitor()
