"""Stretches of time as (start, end), and what they cover."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def union(times: Iterable[tuple[int, int]]) -> int:
    """How much time the stretches cover together."""
    total, reached = 0, 0
    for start, end in sorted(times):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def clipped(times: Iterable[tuple[int, int]], windows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of the stretches that lie in one of the windows."""
    found = [(max(s, a), min(e, b)) for s, e in times for a, b in windows]
    return [(start, end) for start, end in found if end > start]
