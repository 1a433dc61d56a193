"""A queue of events: what happens, in the order of its time. Pure: it knows no clock but its own."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Act = Callable[[float], Any]


class Events:
    """Things that happen at their time; those of one time in the order in which they were noted."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Act]] = []
        self._noted = 0
        #: The time of the last thing that happened.
        self.now = 0.0

    def at(self, time: float, act: Act) -> None:
        """Have ``act(time)`` called then; at once where that is over."""
        self._noted += 1
        heapq.heappush(self._heap, (max(time, self.now), self._noted, act))

    @property
    def next(self) -> float:
        """When the next thing happens; infinite where nothing will."""
        return self._heap[0][0] if self._heap else float("inf")

    def step(self) -> Any:
        """Have the next thing happen; what its act gives."""
        time, _, act = heapq.heappop(self._heap)
        self.now = time
        return act(time)

    def until(self, time: float) -> None:
        """Have everything happen that is to happen by then."""
        while self._heap and self._heap[0][0] <= time:
            self.step()
        self.now = max(self.now, time)
