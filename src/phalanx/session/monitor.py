"""Looks after groups while nobody waits for them: ranks that die idle, deadlines, calls that do not move on."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Protocol

from phalanx.backends.api import Backend
from phalanx.session import session as cluster
from phalanx.session.background import Background

LOOK_EVERY_S = 0.25
_log = logging.getLogger("phalanx")


class Watched(Protocol):
    """A group, as far as it is looked after."""

    @property
    def name(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    @property
    def transport(self) -> Backend: ...

    def look(self) -> None:
        """One look; cheap where nothing has happened."""
        ...


class GroupMonitor:
    """One thread per process, from the first group that it looks after until the last one is gone.

    A look costs some microseconds per group: it reads what the backend knows already.
    """

    def __init__(self) -> None:
        self._cores: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._background = Background("phalanx-monitor", self._turn, first_after=LOOK_EVERY_S)

    def add(self, core: Watched) -> None:
        """Look after a group until it is closed."""
        with self._lock:
            self._cores.add(core)
        self._background.begin()

    def _turn(self) -> float | None:
        with self._lock:
            cores = list(self._cores)
        while cores:
            self._look(cores.pop())  # and not held beyond its look
        return LOOK_EVERY_S if self._cores else None

    def _look(self, core: Watched) -> None:
        if core.closed:
            with self._lock:
                self._cores.discard(core)
            return
        try:
            if core.transport.connected():
                core.look()
            else:
                cluster.lost(core.transport)
        except Exception:  # of the backend, while it shuts down: the next look, or the next call, tells more
            _log.debug("looking after group %r failed", core.name, exc_info=True)


monitor = GroupMonitor()
