"""Publishes this driver's run and its groups where the commands find them: in the background, and never in the way."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import Endpoint
from phalanx.display.log_merging import label_of
from phalanx.display.registry_records import GroupRecord, RankRecord, RunRecord, to_bytes
from phalanx.group.group import Group
from phalanx.group.lifecycle import State
from phalanx.session import session as cluster
from phalanx.session.background import Background
from phalanx.session.session import RUN_ID

_FINISHED_WITHIN_S = 1.0
_STARTED = time.time()
_log = logging.getLogger("phalanx")


def group_entry(group: Group) -> GroupRecord:
    """Return the present entry of a group."""
    record, life = group.card, group.lifecycle
    return GroupRecord(
        run=RUN_ID,
        number=record.number,
        name=record.name,
        state=life.state.value,
        epoch=life.epoch,
        pool=record.pool,
        changed=group.changed,
        weights=dict(group.weights),
        label=label_of(record.classes.items()),
        roles=dict(record.classes),
        methods={role: sorted(methods) for role, methods in record.methods.items()},
        detached=record.detached,
        cause=str(life.cause).partition("\n")[0] if life.cause is not None else None,
        ranks=tuple(_rank_entry(rank, endpoint) for rank, endpoint in enumerate(group.epoch.endpoints)),
    )


def _rank_entry(rank: int, endpoint: Endpoint) -> RankRecord:
    facts = endpoint.facts
    ids = facts.slot.accelerator_ids
    return RankRecord(
        rank=rank,
        node_id=facts.slot.node_id,
        host=facts.slot.host,
        pid=facts.pid,
        accelerator=",".join(ids) or None,
        log=facts.log,
        side=facts.side,
    )


def run_entry(job: str) -> RunRecord:
    """Return the entry of this process."""
    script = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c") else "interactive"
    return RunRecord(
        RUN_ID,
        job,
        os.getpid(),
        socket.gethostname(),
        _STARTED,
        script,
        _version(),
    )


def _version() -> str:
    try:
        return importlib.metadata.version("phalanx")
    except importlib.metadata.PackageNotFoundError:  # it is on the path of Python, and not installed
        return "unknown"


class Publisher:
    """Publishes changes in the background. A group whose state cannot be published works nevertheless."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._background = Background(self._turn, finish=self.finish)
        self._keys: dict[str, Backend] = {}

    def changed(self, group: Group) -> None:
        """Publish a group's state as it is when the thread gets to it; does not wait."""
        if not group.backend.immediate and group.owner:
            self._do(lambda: self._publish(group))

    def add(self, backend: Backend, entry: GroupRecord) -> Callable[[], None]:
        """Publish a group that does not report its changes; return a function that withdraws it."""
        self._do(lambda: self._put(backend, entry))
        return lambda: self._do(lambda: self._take_back(backend, entry.key))

    def _do(self, work: Callable[[], None]) -> None:
        self._work.put(work)
        self._background.begin()

    def flush(self, timeout: float = _FINISHED_WITHIN_S) -> bool:
        """Wait until all changes so far are published; whether they are."""
        if not self._background.running:
            return True
        done = threading.Event()
        self._do(done.set)
        return done.wait(timeout)

    def finish(self, backend: Backend | None = None) -> None:
        """Withdraw the published records of ``backend``, or all; detached groups excepted."""
        if not self.flush():
            return
        with self._lock:
            ended = {key: one for key, one in self._keys.items() if backend in (None, one)}
            self._keys = {key: one for key, one in self._keys.items() if key not in ended}
        for key, one in ended.items():
            self._write(one, key, None)

    def _turn(self) -> float | None:
        with contextlib.suppress(queue.Empty):
            while True:
                work = self._work.get_nowait()
                try:
                    work()
                except Exception:  # whatever it is: it is the commands that then see less, not the run
                    _log.debug("publishing failed", exc_info=True)
                del work  # otherwise it would keep its group alive until the next item
        return None

    def _publish(self, group: Group) -> None:
        entry = group_entry(group)
        if group.lifecycle.state is State.CLOSED:
            self._take_back(group.backend, entry.key)
        else:
            self._put(group.backend, entry)

    def _take_back(self, backend: Backend, key: str) -> None:
        self._write(backend, key, None)
        with self._lock:
            self._keys.pop(key, None)

    def _put(self, backend: Backend, entry: GroupRecord) -> None:
        run = run_entry(backend.job())
        if run.key not in self._keys:
            self._write(backend, run.key, to_bytes(run))
            with self._lock:
                self._keys[run.key] = backend
        self._write(backend, entry.key, to_bytes(entry))
        if not entry.detached:
            with self._lock:
                self._keys[entry.key] = backend

    def _write(self, backend: Backend, key: str, value: bytes | None) -> None:
        try:
            backend.publish(key, value)
        except Exception:
            _log.debug("publishing %s failed", key, exc_info=True)


publisher = Publisher()
cluster.at_letting_go(cluster.LetGoStep.FORGET, publisher.finish)
