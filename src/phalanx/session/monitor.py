"""Monitors groups between calls: ranks that die while idle, deadlines, and stalled calls."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from phalanx.backends.backend_types import Backend
from phalanx.display.registry_records import GroupRecord
from phalanx.session.background import Background, monitor_thread

LOOK_EVERY_S = 0.25
_log = logging.getLogger("phalanx")


class OpenGroup(Protocol):
    """A group, as far as its session knows it.

    ``closed`` is True if it takes no calls any more, ``fully_closed`` if nothing of it is left.
    """

    @property
    def name(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    @property
    def fully_closed(self) -> bool: ...
    @property
    def backend(self) -> Backend: ...
    def record(self) -> GroupRecord: ...


W = TypeVar("W", bound=OpenGroup)


class GroupMonitor:
    """Monitors groups from the first to the last live group.

    A check takes some microseconds per group while no rank has failed: it reads cached state of the backend.

    Args:
        lost: is called with a backend whose cluster was left.
    """

    def __init__(self, lost: Callable[[Backend], None]) -> None:
        self._lost = lost
        self._looks: weakref.WeakKeyDictionary[OpenGroup, Callable[[Any], None]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._background = Background(self._turn, thread=monitor_thread, first_after=LOOK_EVERY_S)

    def add(self, core: W, look: Callable[[W], None]) -> None:
        """Check a group by ``look(core)``, which replaces an earlier function of the group, until it is closed."""
        with self._lock:
            self._looks[core] = look
        self._background.begin()

    def _turn(self) -> float | None:
        with self._lock:
            looks = list(self._looks.items())
        while looks:
            self._look(*looks.pop())  # and not held beyond its look
        return LOOK_EVERY_S if self._looks else None

    def _look(self, core: OpenGroup, look: Callable[[Any], None]) -> None:
        if core.closed:
            with self._lock:
                self._looks.pop(core, None)
            return
        try:
            if core.backend.connected():
                look(core)
            else:
                self._lost(core.backend)
        except Exception:  # of the backend, while it shuts down: the next look, or the next call, tells more
            _log.debug("looking after group %r failed", core.name, exc_info=True)
