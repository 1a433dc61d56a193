"""Slots of pools that nobody holds any more and nobody closed: they are given back."""

from __future__ import annotations

import logging
import threading
import weakref
from contextlib import suppress
from queue import Empty, SimpleQueue

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import Reservation
from phalanx.session.background import Background

LOOK_EVERY_S = 0.5
_log = logging.getLogger("phalanx")


class DroppedSlots:
    """Gives reservations back whose holder was collected.

    The collector comes at any time, in any thread, with any lock held: it only puts the reservation in a queue, and
    a thread that is there as long as there are holders gives it back.
    """

    def __init__(self) -> None:
        self._dropped: SimpleQueue[tuple[Backend, Reservation]] = SimpleQueue()
        self._held: list[weakref.finalize[..., object]] = []
        self._lock = threading.Lock()
        self._background = Background(self._turn, first_after=LOOK_EVERY_S)

    def give_back_without(
        self, holder: object, backend: Backend, reservation: Reservation
    ) -> weakref.finalize[..., object]:
        """Give a reservation back once ``holder`` is collected; what to ``detach()`` where somebody else does."""
        finalizer = weakref.finalize(holder, self._dropped.put, (backend, reservation))
        finalizer.atexit = False  # the backend then frees everything
        with self._lock:
            self._held.append(finalizer)
        self._background.begin()
        return finalizer

    def _turn(self) -> float | None:
        with suppress(Empty):
            while True:
                backend, reservation = self._dropped.get_nowait()
                _log.debug("a pool was dropped without close(): its slots are given back")
                backend.release(reservation)
        with self._lock:
            self._held = [finalizer for finalizer in self._held if finalizer.alive]
            return LOOK_EVERY_S if self._held or not self._dropped.empty() else None


dropped_slots = DroppedSlots()
