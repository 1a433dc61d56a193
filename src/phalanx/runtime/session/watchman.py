"""Looks after groups while nobody waits for them: ranks that die idle, deadlines, calls that do not move on."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.runtime.calls.future import CallFuture
    from phalanx.runtime.groups.core import GroupCore

LOOK_EVERY_S = 0.25
_log = logging.getLogger("phalanx")


class Sentinel:
    """One thread per process, from the first group that it looks after until the last one is gone.

    A look costs some microseconds per group: it reads what the backend knows already.
    """

    def __init__(self) -> None:
        self._cores: weakref.WeakSet[GroupCore] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, core: GroupCore) -> None:
        """Look after a group until it is closed."""
        with self._lock:
            self._cores.add(core)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="phalanx-sentinel", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(LOOK_EVERY_S):
            with self._lock:
                cores = list(self._cores)
            while cores:
                self._look(cores.pop())  # and not held beyond its look
            with self._lock:
                if not self._cores:
                    self._thread = None
                    return

    def _look(self, core: GroupCore) -> None:
        if core.closed:
            with self._lock:
                self._cores.discard(core)
            return
        try:
            look(core)
        except Exception:  # of the backend, while it shuts down: the next look, or the next call, tells more
            _log.debug("looking after group %r failed", core.name, exc_info=True)


def look(core: GroupCore) -> None:
    """One look at one group."""
    calls = core.under_way()
    now = core.now()
    for call in calls:
        if call.epoch != core.epoch:
            continue
        if call.deadline is not None and now >= call.deadline:
            call.try_settle()
        elif call.stall_at is not None and now >= call.stall_at:
            report_stall(core, call)
    if core.has_dead():
        # A call that a rank died in tells more than the death alone: its own watch finds out first.
        failed = [call for call in calls if core.touches_dead(call)]
        for call in failed:
            call.try_settle()
        if not failed:
            core.lost()


def report_stall(core: GroupCore, call: CallFuture[Any]) -> None:
    """Log where each rank is at a call that takes longer than it should, and let it go on."""
    found = core.watch(call).timeout(round(core.now() - call.started, 1))
    if found is None:
        call.stall_at = None
        return
    call.stall_at = core.now() + (call.stall_report_after or 0.0)
    _log.warning("stalled, still running: %s", found[0])


sentinel = Sentinel()
