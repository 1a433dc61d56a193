"""Counters over the time of a trace, such as the items in a channel. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from phalanx.tracing.events import Counter

CHANNEL, WAITING, OLDEST = "channel ", "items that wait", "age of the oldest, ms"
MOST_POINTS = 10_000


class Points:
    """The values of one counter as they come. Beyond ``MOST_POINTS`` every second value is dropped, again and again."""

    def __init__(self) -> None:
        self._points: list[tuple[int, dict[str, float]]] = []
        self._gap = 0

    def add(self, now: int, values: Mapping[str, float]) -> None:
        """Add the values from ``now`` on."""
        points = self._points
        if points and now - points[-1][0] < self._gap:
            points[-1] = (points[-1][0], dict(values))
            return
        points.append((now, dict(values)))
        if len(points) > MOST_POINTS:
            self._points = points[::2]
            self._gap = (points[-1][0] - points[0][0]) // len(self._points)

    def counter(self, name: str, began: int, ended: int) -> Counter | None:
        """Return the values between two times; None if there are none."""
        before = max(0, bisect_right(self._points, began, key=lambda point: point[0]) - 1)
        seen = [(max(at, began), values) for at, values in self._points[before:] if at <= ended]
        if not seen:
            return None
        series = {name: tuple(values.get(name, 0.0) for _, values in seen) for name in seen[0][1]}
        return Counter(name, tuple(at for at, _ in seen), series)


def resampled(at: Sequence[int], values: Sequence[float], began: int, ended: int, count: int) -> list[float]:
    """Return the values at ``count`` times at equal distances; 0 before the first value."""
    times = [began + (ended - began) * index // max(1, count - 1) for index in range(count)]
    places = [bisect_right(at, time) - 1 for time in times]
    return [0.0 if place < 0 else values[place] for place in places]
