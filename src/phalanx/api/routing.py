"""Which rank of a serving role a key goes to: the one it went to before, unless that is much busier. Pure.

Caller -> `StickyRouting.route(key, loads)` -> rank; the link (`api/sticky.py`, `px.engines.sticky`)
knows the loads (calls in flight by rank, of ranks that live) and makes the call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Literal

from phalanx.errors import DeclarationError

Why = Literal["new", "kept", "moved", "lost"]


@dataclass(frozen=True)
class Route:
    """The rank that a key goes to; `before` is where it was, None for a new key.

    `why`: "new"; "kept"; "moved", since that rank had more than `margin` calls more than another; "lost", since
    it is no longer among the ranks.
    """

    rank: int
    why: Why
    before: int | None = None


class StickyRouting:
    """Pins of keys to ranks.

    Args:
        margin: how much busier than the least busy rank, in the unit of the loads, a key's rank may be before the
            key moves. 0 moves at any difference; the caches of a conversation are worth some calls of waiting.
        max_keys: pins that are kept; the one not asked for longest is forgotten first.

    Raises:
        DeclarationError: `margin` is negative or `max_keys` below 1.
    """

    def __init__(self, margin: float, max_keys: int = 100_000) -> None:
        if margin < 0 or max_keys < 1:
            raise DeclarationError(
                f"StickyRouting(margin={margin}, max_keys={max_keys}): give a margin of 0 or more and at least 1 key"
            )
        self.margin, self.max_keys = margin, max_keys
        self._pins: OrderedDict[Hashable, int] = OrderedDict()
        self._keys: dict[int, int] = {}

    def route(self, key: Hashable, loads: Mapping[int, float]) -> Route:
        """The rank for `key`, given the load of each rank that lives. It is pinned there.

        A new key goes to the least busy rank, of several to the one with the fewest keys, then the lowest.

        Raises:
            ValueError: `loads` names no rank.
        """
        if not loads:
            raise ValueError("no rank to route to: loads is empty; give the load of each rank that lives")
        least = min(loads, key=lambda rank: (loads[rank], self._keys.get(rank, 0), rank))
        before = self._pins.get(key)
        route = self._choose(before, least, loads)
        self._pin(key, route.rank)
        return route

    def forget(self, key: Hashable) -> None:
        """The conversation is over."""
        rank = self._pins.pop(key, None)
        if rank is not None:
            self._count(rank, -1)

    def keys(self) -> dict[int, int]:
        """How many keys are pinned to each rank."""
        return dict(self._keys)

    def _choose(self, before: int | None, least: int, loads: Mapping[int, float]) -> Route:
        if before is None:
            return Route(least, "new")
        if before not in loads:
            return Route(least, "lost", before)
        if loads[before] - loads[least] > self.margin:
            return Route(least, "moved", before)
        return Route(before, "kept", before)

    def _pin(self, key: Hashable, rank: int) -> None:
        self.forget(key)
        self._pins[key] = rank
        self._count(rank, 1)
        if len(self._pins) > self.max_keys:
            self.forget(next(iter(self._pins)))

    def _count(self, rank: int, by: int) -> None:
        self._keys[rank] = self._keys.get(rank, 0) + by
        if not self._keys[rank]:
            del self._keys[rank]
