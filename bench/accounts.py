"""Peak memory of a contender's processes during a scenario, measured from outside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import psutil


def private_bytes(pid: int) -> int:
    """Return the resident memory that no other process shares, without the object store and mapped files."""
    info = psutil.Process(pid).memory_info()
    return info.rss - info.shared


@dataclass
class PeakWatch:
    """Highest private memory of a driver and its workers, above their memory at the start of the watch.

    workers is the highest sum over all workers in a sample.
    """

    driver_pid: int
    worker_pids: Iterable[int]
    read: Callable[[int], int] = private_bytes
    driver: int = 0
    workers: int = 0
    _base: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.worker_pids = tuple(self.worker_pids)
        for pid in (self.driver_pid, *self.worker_pids):
            self._base[pid] = self.read(pid)

    def look(self) -> None:
        """Sample the memory; dead processes count as nothing."""
        self.driver = max(self.driver, self._grown(self.driver_pid))
        self.workers = max(self.workers, sum(self._grown(pid) for pid in self.worker_pids))

    def _grown(self, pid: int) -> int:
        with contextlib.suppress(psutil.NoSuchProcess):
            return max(0, self.read(pid) - self._base[pid])
        return 0


@dataclass(frozen=True)
class Account:
    """Bytes of an untimed run. None: not counted (the floor has no store; grpcio may be missing)."""

    contender: str
    label: str
    payload: int
    driver_peak: int
    workers_peak: int
    store_created: int | None
    store_peak: int | None
    driver_fetched: int | None
    counters: dict[str, int] = field(default_factory=dict)
