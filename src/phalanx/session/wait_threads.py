"""Threads that wait for calls, on behalf of an event loop or of a wait for several calls."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from phalanx.backends.backend_types import Backend, Ref
from phalanx.session.background import Background, monitor_thread

R = TypeVar("R")

_MOST = 32
_SPARE = 8  # additional threads, for finished waits while all others are busy
_IDLE_S = 5.0
_LOOK_EVERY_S = 0.02
_ENDED_IN_PART_S = 0.5


@dataclass(frozen=True)
class Pending:
    """References of a wait: it is over once all references have ended, or at ``deadline`` (``time.monotonic()``)."""

    backend: Backend
    refs: Sequence[Ref]
    deadline: float | None = None


@dataclass(eq=False)
class _Wait:
    future: Future[Any]
    work: Callable[[], Any]
    in_part_since: float | None = None

    def do(self) -> None:
        if not (self.future.running() or self.future.set_running_or_notify_cancel()):
            return
        try:
            self.future.set_result(self.work())
        except BaseException as error:
            self.future.set_exception(error)


class WaitThreads:
    """Threads for waits, one for each of up to ``most``. Further waits are polled, and get a thread once finished.

    Waits may depend on each other: if no thread makes progress, more are started. Idle threads end. Unlike the threads
    of a ``ThreadPoolExecutor`` they are daemons: the interpreter joins an executor's threads when it exits, so that an
    abandoned wait would keep the process from ending.
    """

    def __init__(self, most: int = _MOST, idle_s: float = _IDLE_S) -> None:
        self._most = most
        self._idle_s = idle_s
        self._lock = (
            threading.Lock()
        )  # entered itself: Ctrl-C within the condition's methods would leave it locked
        self._changed = threading.Condition(self._lock)
        self._begun: deque[_Wait] = deque()  # assigned to idle threads
        self._threads = 0
        self._idle = 0  # threads that wait for work, minus the number of waits assigned to them
        self._done = 0
        self._done_before = 0
        self._others: dict[_Wait, Pending] = {}
        self._looker = Background(self._look, thread=monitor_thread)

    def submit(self, work: Callable[[], R], pending: Pending | None = None) -> Future[R]:
        """Run ``work()`` on a thread: now, or if all threads are busy, once its pending references have ended.

        Without ``pending`` it begins now, on an additional thread if necessary, and cannot be cancelled.
        """
        future: Future[R] = Future()
        wait = _Wait(future, work)
        if pending is None:
            future.set_running_or_notify_cancel()
        with self._lock:
            if pending is None or self._idle or self._threads < self._most:
                self._begin(wait)
                return future
            self._others[wait] = pending
        self._looker.begin()
        return future

    def _begin(self, wait: _Wait) -> None:
        """Assign a wait to an idle thread, or to a new thread; under the lock."""
        if self._idle:
            self._idle -= 1
            self._begun.append(wait)
            self._changed.notify()
            return
        self._threads += 1
        threading.Thread(target=self._run, args=(wait,), name="phalanx-await", daemon=True).start()

    def _run(self, wait: _Wait | None) -> None:
        while wait is not None:
            wait.do()
            del wait  # otherwise it would keep its call until the next wait
            wait = self._next()

    def _next(self) -> _Wait | None:
        """Return the next wait for this thread; None if the thread is to end."""
        with self._lock:
            self._done += 1
            if self._others and self._threads <= self._most:
                first = next(iter(self._others))
                del self._others[first]
                return first
            self._idle += 1
            if self._changed.wait_for(lambda: self._begun, self._idle_s):
                return self._begun.popleft()
            self._idle -= 1
            self._threads -= 1
            return None

    def _look(self) -> float | None:
        """Hand finished waits to free threads; if no thread made progress, to an additional thread."""
        with self._lock:
            others = dict(self._others)
        if not others:
            return None
        ended, now = _ended(others.values()), time.monotonic()
        over, in_part = list[_Wait](), list[_Wait]()
        for wait, pending in others.items():
            has_ended = [id(ref) in ended for ref in pending.refs]
            is_late = pending.deadline is not None and now >= pending.deadline
            if is_late or all(has_ended) or wait.future.cancelled():
                over.append(wait)
            elif any(has_ended):
                wait.in_part_since = wait.in_part_since or now
                if now - wait.in_part_since > _ENDED_IN_PART_S:  # it may have failed, which ends a call
                    in_part.append(wait)
        with self._lock:
            free = self._idle + max(0, self._most + _SPARE - self._threads)
            is_stuck, self._done_before = self._done == self._done_before, self._done
            # A partly finished wait may occupy its thread for long, so it gets no additional thread.
            for wait in [*over, *in_part][:free] or over[: int(is_stuck)]:
                if self._others.pop(wait, None) is not None:  # else a thread took it in the meantime
                    self._begin(wait)
        return _LOOK_EVERY_S


def _ended(waits: Iterable[Pending]) -> set[int]:
    """Return the ids of the references that have ended; all references of a backend that raises."""
    by_backend: dict[Backend, dict[int, Ref]] = {}
    for pending in waits:
        by_backend.setdefault(pending.backend, {}).update((id(ref), ref) for ref in pending.refs)
    ended: set[int] = set()
    for backend, refs in by_backend.items():
        ids = [*refs]
        try:
            done = backend.wait([*refs.values()], len(refs), 0)[0] if refs else []
        except Exception:
            done = range(len(ids))
        ended.update(ids[position] for position in done)
    return ended
