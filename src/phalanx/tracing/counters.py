"""Counters over the time of a trace, such as the items in a channel. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from phalanx.tracing.events import Counter

__all__ = ["CHANNEL", "OLDEST", "WAITING", "Points", "resampled"]

CHANNEL, WAITING, OLDEST = "channel ", "items that wait", "age of the oldest, ms"
MOST_POINTS = 10_000


class Points:
    """The values of one counter as they come. Of very many, every second one is kept, and fewer come from then on."""

    def __init__(self) -> None:
        self._points: list[tuple[int, dict[str, float]]] = []
        self._gap = 0

    def add(self, now: int, values: Mapping[str, float]) -> None:
        """So much there is from now on."""
        points = self._points
        if points and now - points[-1][0] < self._gap:
            points[-1] = (points[-1][0], dict(values))
            return
        points.append((now, dict(values)))
        if len(points) > MOST_POINTS:
            self._points = points[::2]
            self._gap = (points[-1][0] - points[0][0]) // len(self._points)

    def counter(self, name: str, began: int, ended: int) -> Counter | None:
        """What was counted between two times; None where that is nothing."""
        points = self._points
        before = max(0, bisect_right(points, began, key=lambda point: point[0]) - 1)
        seen = [(max(at, began), values) for at, values in points[before:] if at <= ended]
        if not seen:
            return None
        names = seen[0][1]
        series = {one: tuple(values.get(one, 0.0) for _, values in seen) for one in names}
        return Counter(name, tuple(at for at, _ in seen), series)


def resampled(counter: Counter, values: tuple[float, ...], began: int, ended: int, count: int) -> list[float]:
    """What there was at so many times at equal distances; 0 before the first value."""
    times = [began + (ended - began) * index // max(1, count - 1) for index in range(count)]
    places = [bisect_right(counter.at, time) - 1 for time in times]
    return [0.0 if place < 0 else values[place] for place in places]
