"""Who of this process is told that rows of a lease have become too old."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

from phalanx.channels.services import Port


class Late(Protocol):
    """A lease, as far as it is told."""

    number: int

    def became_overdue(self) -> None:
        """Note it. Called by what brings the news, with locks held: it does not wait."""
        ...


class Overdue:
    """The leases of one process at one home, for what that tells of them."""

    def __init__(self) -> None:
        self._leases: weakref.WeakValueDictionary[int, Late] = weakref.WeakValueDictionary()
        self._early: set[int] = set()
        """Told of before this process had the answer that there is such a lease."""
        self._lock = threading.Lock()

    def add(self, lease: Late) -> None:
        """Tell it when it is overdue, which it may be already."""
        with self._lock:
            self._leases[lease.number] = lease
            late = lease.number in self._early
            self._early.discard(lease.number)
        if late:
            lease.became_overdue()

    def __call__(self, note: Any) -> None:
        if note[0] != "overdue":
            return
        with self._lock:
            lease = self._leases.get(note[1])
            if lease is None:
                self._early.add(note[1])
        if lease is not None:
            lease.became_overdue()


_overdue: weakref.WeakKeyDictionary[Any, dict[str, Overdue]] = weakref.WeakKeyDictionary()


def overdue_of(port: Port, key: str) -> Overdue:
    """Those of one home; whoever makes leases adds them."""
    found = _overdue.setdefault(port, {}).setdefault(key, Overdue())  # the same for all threads
    port.hear(key, found)
    return found
