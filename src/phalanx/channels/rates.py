"""How many a second, over a sliding window of the caller's clock."""

from __future__ import annotations

from collections import deque


class Rate:
    """Counts of the last `window` seconds, kept in tenths of it."""

    def __init__(self, window: float = 10.0) -> None:
        self._width = window / 10
        self._began: float | None = None
        self._buckets: deque[tuple[int, int]] = deque()

    def add(self, count: int, now: float) -> None:
        """`count` of them happened at `now`, in seconds."""
        self._began = now if self._began is None else self._began
        bucket = int(now // self._width)
        if self._buckets and self._buckets[-1][0] >= bucket:
            last, sofar = self._buckets[-1]
            self._buckets[-1] = (last, sofar + count)
        else:
            self._buckets.append((bucket, count))
        self._forget(now)

    def per_second(self, now: float) -> float:
        """Of the window that ends at `now`, or of the shorter time since the first; 0 before that."""
        self._forget(now)
        if self._began is None:
            return 0.0
        seconds = min(max(now - self._began, self._width), 10 * self._width)
        return sum(count for _, count in self._buckets) / seconds

    def _forget(self, now: float) -> None:
        oldest = int(now // self._width) - 10
        while self._buckets and self._buckets[0][0] <= oldest:
            self._buckets.popleft()


class Rates:
    """How fast a channel flows: items that came in, items and bytes that were delivered."""

    def __init__(self) -> None:
        self.accepted, self.delivered, self.delivered_bytes = Rate(), Rate(), Rate()
