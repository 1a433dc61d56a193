"""The pools of this process that hold slots, and those that it keeps for others."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from phalanx.backends.api import Backend
from phalanx.pools.slot_reservation import Tenant
from phalanx.session import session as cluster


class OpenPool(Protocol):
    """A pool of this process."""

    name: str
    number: int
    """Counts the pools in the order in which they were made."""

    @property
    def world_size(self) -> int: ...
    @property
    def groups(self) -> tuple[Tenant, ...]: ...
    @property
    def closed(self) -> bool: ...
    @property
    def backend_api(self) -> Backend: ...
    def let_go(self, everything: bool = False) -> None: ...


class LivePools:
    """Those that were not closed."""

    def __init__(self) -> None:
        self._open: weakref.WeakSet[OpenPool] = weakref.WeakSet()
        self._kept: set[OpenPool] = set()
        self._lock = threading.Lock()

    def add(self, pool: OpenPool) -> None:
        """Note one that has reserved slots."""
        with self._lock:
            self._open.add(pool)

    def keep(self, pool: OpenPool) -> None:
        """Hold one that other processes know a group of, even if nobody in this one does any more."""
        self._kept.add(pool)

    def forget(self, pool: OpenPool) -> None:
        """Note that one is closed. Idempotent."""
        with self._lock:
            self._open.discard(pool)
        self._kept.discard(pool)

    def now(self) -> list[OpenPool]:
        """Those that hold slots, in the order in which they were made."""
        with self._lock:
            there = list(self._open)
        return sorted((pool for pool in there if not pool.closed), key=lambda pool: pool.number)

    def let_go(self, backend: Backend | None) -> None:
        """Close those of a backend that is let go of; None: all."""
        for pool in self.now():
            if backend is None or pool.backend_api is backend:
                pool.let_go(everything=backend is None)


open_pools = LivePools()
cluster.at_letting_go(cluster.Step.CLOSE, open_pools.let_go)
