"""In which order many processes are started, and how many of them at a time. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

AT_ONCE = 256
"""Processes that are asked for before the first of them has to be there.

So a start of fewer is one wave. Of more, the next ones are asked for as those before them report: the controller of the
cluster then has a short queue, and no process waits in it for longer than it takes to start.
"""


def order_of_start(places: Sequence[Hashable]) -> list[int]:
    """The positions in an order in which every place has its first process before any has its second.

    ``places[i]`` is where process ``i`` is to be, such as its block. So all nodes start processes all the time, and the
    first ranks of each begin at about the same time.
    """
    rounds: dict[int, list[int]] = defaultdict(list)
    seen: dict[Hashable, int] = defaultdict(int)
    for position, place in enumerate(places):
        rounds[seen[place]].append(position)
        seen[place] += 1
    return [position for turn in sorted(rounds) for position in rounds[turn]]


def refill(pending: int, left: int, at_once: int = AT_ONCE) -> int:
    """How many processes more are to be asked for now, of ``left``, while ``pending`` are on their way.

    Some are asked for together, so that looking for those that are there costs less than starting them.
    """
    room = at_once - pending
    return min(left, room) if room >= max(1, at_once // 4) or room >= left else 0
