"""How far apart the ranks of a group started, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

_WORTH_TELLING_S = 0.1


def apart(times: Sequence[tuple[float, float]]) -> str:
    """How far apart constructors began and ended, of ``(began, ended)`` in seconds by rank; empty where that is little.

    Between nodes it is as exact as their clocks.
    """
    if len(times) < 2:
        return ""
    began, ended = [one for one, _ in times], [one for _, one in times]
    later, longer = max(began) - min(began), max(ended) - min(ended)
    if max(later, longer) < _WORTH_TELLING_S:
        return ""
    last, slowest = began.index(max(began)), ended.index(max(ended))
    return (
        f"constructors: rank {last} began last, {later:.1f} s after the first; "
        f"rank {slowest} ended last, {longer:.1f} s after the first"
    )


def by_node(hosts: Sequence[str], waiting: Collection[int]) -> str:
    """Which nodes still have ranks that are not ready, of ``hosts`` by rank; empty where all are on one."""
    total = Counter(hosts)
    left = Counter(hosts[rank] for rank in waiting)
    if len(total) < 2 or not left:
        return ""
    host, missing = max(left.items(), key=lambda item: item[1])
    there = f"{total[host] - missing} of {total[host]} on {host}"
    return f"{len(total) - len(left)} of {len(total)} nodes ready; {there}"
