"""A clock and references of a backend whose time passes only while a caller waits."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.backends.backend_types import Endpoint, FetchFailed, Lost, NotReady, RankOutcome, Ref
from phalanx.backends.inline_values import InlineRef, Unended, fetched, outcome_of
from phalanx.errors import InternalError
from phalanx.wire.failure import RankFailure

FOR_EVER = float("inf")


class SteppedClock:
    """Seconds that pass only by :meth:`advance`. Safe to read and move from several threads."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._lock = threading.Lock()

    def now(self) -> float:
        """The time in seconds."""
        return self._now

    def advance(self, seconds: float) -> float:
        """Let time pass; the new time.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"advance({seconds!r}): time does not go back; give 0 or more seconds")
        with self._lock:
            self._now += seconds
            return self._now

    def advance_to(self, time: float) -> float:
        """Let time pass until ``time``, if that is still to come; the new time."""
        with self._lock:
            self._now = max(self._now, time)
            return self._now


@dataclass(eq=False)
class TimedRef:
    """An inline result that is there from ``at`` on; for ever under way where nobody knows when."""

    inner: InlineRef
    at: float = 0.0
    endpoint: Endpoint | None = field(default=None, repr=False)

    def get(self) -> Any:
        return self.inner.get()

    @property
    def failure(self) -> RankFailure | None:
        return self.inner.failure

    @property
    def lost(self) -> Lost | None:
        return self.inner.lost


def at_of(ref: Ref) -> float:
    """From when on a reference is there: what is stored is there at once."""
    if isinstance(ref, TimedRef):
        return ref.at
    return FOR_EVER if isinstance(ref, Unended) and ref.under_way else 0.0


def plain(refs: Sequence[Ref]) -> list[Ref]:
    """References that a rank in this process reads."""
    return [ref.inner if isinstance(ref, TimedRef) else ref for ref in refs]


class TimedCalls:
    """Waiting on a clock of its own, for a backend that says by ``_reach`` how time passes."""

    clock: SteppedClock

    def now(self) -> float:
        return self.clock.now()

    def _reach(self, refs: Sequence[Ref], count: int, limit: float, *, stop_at_failure: bool) -> None:
        """Let time pass until ``count`` of the references are there, or one failed, or to the limit."""
        times = sorted(refs, key=at_of)[:count]
        until = at_of(times[-1]) if times else 0.0
        if stop_at_failure:
            until = min([at_of(ref) for ref in times if _failed(ref)], default=until)
        self._pass(min(until, limit))

    def _pass(self, time: float) -> None:
        if time == FOR_EVER:
            raise InternalError("somebody waits without a limit for a rank that never ends")
        self.clock.advance_to(time)

    def _limit(self, timeout: float | None) -> float:
        return FOR_EVER if timeout is None else self.clock.now() + timeout

    def wait(self, refs: Sequence[Ref], count: int, timeout: float | None) -> tuple[list[int], list[int]]:
        self._reach(refs, min(count, len(refs)), self._limit(timeout), stop_at_failure=False)
        now = self.clock.now()
        done = [index for index, ref in enumerate(refs) if at_of(ref) <= now]
        if len(done) == len(refs):
            return done, []
        return done, [index for index, ref in enumerate(refs) if at_of(ref) > now]

    def fetch(self, refs: Sequence[Ref], timeout: float | None = None) -> list[Any]:
        self._reach(refs, len(refs), self._limit(timeout), stop_at_failure=True)
        now = self.clock.now()
        late = False
        for ref in refs:
            if at_of(ref) > now:
                late = True
            elif _failed(ref):
                raise FetchFailed
        if late:
            raise NotReady
        return fetched(refs)

    def outcome(self, ref: Ref) -> RankOutcome:
        return outcome_of(ref)


def _failed(ref: Ref) -> bool:
    return ref.failure is not None or ref.lost is not None
