"""The live groups of this process."""

from __future__ import annotations

import threading
import weakref

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import CLUSTER_LEFT
from phalanx.display.metric_buffer import meters
from phalanx.group.group import Group
from phalanx.session import session as cluster


class LiveGroups:
    """Groups of this process, its own and views of others."""

    def __init__(self) -> None:
        self._groups: weakref.WeakSet[Group] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, group: Group) -> None:
        """Note a group that was made here, or came here, and report its counts to a monitor that is there."""
        if not group.backend.immediate:
            meters.watch(group.name, group.counts)
        with self._lock:
            self._groups.add(group)

    def now(self) -> list[Group]:
        """Return them."""
        with self._lock:
            return list(self._groups)

    def own(self, number: int) -> Group | None:
        """Return the group that this process made with that number; None if it was garbage-collected."""
        return next((one for one in self.now() if one.owner and one.card.number == number), None)

    def _open(self, backend: Backend | None) -> list[Group]:
        return [one for one in self.now() if backend in (None, one.backend) and not one.closed]

    def note_left(self, backend: Backend | None) -> None:
        """Note why the groups of a backend, or all that this process owns, will be closed."""
        for group in self._open(backend):
            if backend is not None or group.owner:
                group.lifecycle.closed_because = CLUSTER_LEFT

    def close_left(self, backend: Backend | None) -> None:
        """Close, in this process, the open groups of a backend: they have other owners, or outlive the backend."""
        for group in self._open(backend) if backend is not None else ():
            group.on_change = None  # their owner publishes their state
            group.begin_close()
            group.finish_close()


open_groups = LiveGroups()
cluster.at_letting_go(cluster.LetGoStep.NOTE, open_groups.note_left)
cluster.at_letting_go(cluster.LetGoStep.FORGET, open_groups.close_left)
