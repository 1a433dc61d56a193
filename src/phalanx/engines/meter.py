"""Counts of one engine, and how many tokens it draws per second."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from phalanx.engines.engine_requests import Row
from phalanx.engines.engine_types import EngineStatistics, PauseMode

__all__ = ["IDLE_S", "Meter"]

_WINDOW_S = 10.0
IDLE_S = _WINDOW_S + 0.5
"""After so many seconds without a step no tokens per second are told any more."""
_TELL_S = 0.5


class Meter:
    """Of one engine; ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._steps: deque[tuple[float, float, int]] = deque()  # when it ended, seconds, tokens
        self._last = 0.0
        self._told: float | None = None
        self.requests = 0
        self.aborted = 0
        self.tokens = 0

    def begins(self) -> None:
        """There is something to do again; the time until now was none at work."""
        self._last = self._clock()

    def drew(self, tokens: int) -> None:
        """A step is over."""
        now = self._clock()
        self._steps.append((now, now - self._last, tokens))
        self._last = now
        self.tokens += tokens
        while self._steps[0][0] < now - _WINDOW_S:
            self._steps.popleft()

    def due(self) -> bool:
        """Whether it is time to tell people again: twice a second."""
        if self._told is not None and self._clock() < self._told + _TELL_S:
            return False
        self._told = self._clock()
        return True

    def ended(self, row: Row) -> None:
        """A row is at its end."""
        self.requests += 1
        self.aborted += any(answer.finish_reason == "abort" for answer in row.answers)

    @property
    def tokens_per_second(self) -> float:
        """Of the last ten seconds, without those in which there was nothing to do; 0 where that is all of them."""
        if not self._steps or self._steps[-1][0] < self._clock() - _WINDOW_S:
            return 0.0
        seconds = sum(step[1] for step in self._steps)
        return sum(step[2] for step in self._steps) / seconds if seconds else 0.0

    def statistics(
        self, *, running: int, waiting: int, cache_use: float, version: int, paused: PauseMode | None
    ) -> EngineStatistics:
        """The counts, with what the engine does now."""
        return EngineStatistics(
            running=running,
            waiting=waiting,
            requests=self.requests,
            aborted=self.aborted,
            tokens=self.tokens,
            tokens_per_second=self.tokens_per_second,
            cache_use=cache_use,
            version=version,
            paused=paused,
        )
