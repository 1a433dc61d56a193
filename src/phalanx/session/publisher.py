"""Publication of this driver's run and its groups for the CLI, in the background."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from phalanx.backends.backend_types import Backend
from phalanx.display.registry_records import GroupRecord, RunRecord, to_bytes
from phalanx.session.background import WorkQueue

_FINISHED_WITHIN_S = 1.0
_STARTED = time.time()


def run_record(run: str, job: str) -> RunRecord:
    """Return the record of this process."""
    script = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c") else "interactive"
    return RunRecord(run, job, os.getpid(), socket.gethostname(), _STARTED, script)


class Publisher:
    """Publishes records of groups. The queue logs errors: a group works without its record."""

    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue
        self._lock = threading.Lock()
        self._keys: dict[str, Backend] = {}
        self._kept: set[str] = set()  # keys of detached groups and of their runs, which outlive this driver

    def changed(self, group: Any) -> None:
        """Publish the state that a ``Group`` has when the background thread gets to it; does not wait."""
        self._queue.add(self._publish, group)

    def add(self, backend: Backend, record: GroupRecord) -> Callable[[], None]:
        """Publish a group that does not report its changes; return a function that withdraws it."""
        self._queue.add(self._put, backend, record)
        return lambda: self._queue.add(self._withdraw, backend, record.key)

    def flush(self, timeout: float = _FINISHED_WITHIN_S) -> bool:
        """Wait until all changes so far are published; return whether they are."""
        return self._queue.flush(timeout)

    def finish(self, backend: Backend | None = None) -> None:
        """Withdraw the records published on ``backend`` (None: on any), except detached groups and their runs."""
        if self.flush():
            with self._lock:
                for key, one in self._keys.items():
                    if backend in (None, one) and key not in self._kept:
                        self._queue.add(self._withdraw, one, key)
            self.flush()

    def _publish(self, group: Any) -> None:
        record: GroupRecord = group.record()
        if record.state == "closed":
            self._withdraw(group.backend, record.key)
        else:
            self._put(group.backend, record)

    def _withdraw(self, backend: Backend, key: str) -> None:
        with self._lock:
            if self._keys.get(key) is backend:  # else another group of the run has published it since
                del self._keys[key]
        backend.publish(key, None)

    def _put(self, backend: Backend, record: GroupRecord) -> None:
        run = run_record(record.run, backend.job)
        if record.detached:
            self._kept |= {run.key, record.key}
        if self._keys.get(run.key) is not backend:
            atexit.unregister(self.finish)
            atexit.register(self.finish)
            backend.publish(run.key, to_bytes(run))
        backend.publish(record.key, to_bytes(record))
        with self._lock:
            self._keys |= {run.key: backend, record.key: backend}
