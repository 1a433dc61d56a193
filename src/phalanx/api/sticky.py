"""``px.engines.sticky``: send all calls of a key to the same rank of a serving group, to reuse its caches."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from phalanx.api.view import GroupView, RankView
from phalanx.errors import DeclarationError
from phalanx.wire.value import Reduced

_MARGIN = 2.0
_MOST_KEYS = 100_000


class Pins:
    """Table of the process that each key of a group is pinned to. A replaced process counts as a new rank."""

    def __init__(self, margin: float, most: int = _MOST_KEYS) -> None:
        self._margin = margin
        self._most = most  # the least recently used key is dropped first
        self._pins: OrderedDict[Hashable, object] = OrderedDict()
        self._keys: Counter[int] = Counter()  # number of keys by id of the process, which the pins keep alive
        self._lock = threading.Lock()

    def __reduce__(self) -> Reduced:
        raise DeclarationError(
            "px.engines.sticky(group, key) chooses ranks in the process that called it; pass the group, and call it "
            "there"
        )

    def rank_of(self, key: Hashable, loads: Mapping[int, int], processes: Sequence[object]) -> int:
        """Return the rank for a key and pin the key to it, given the calls in flight on each living rank.

        A new key goes to the least busy rank; ties go to the rank with the fewest keys, then to the lowest rank.
        """
        with self._lock:
            least = min(loads, key=lambda rank: (loads[rank], self._keys[id(processes[rank])], rank))
            before = self._forget(key)
            rank = next((rank for rank in loads if processes[rank] is before), least)
            if loads[rank] - loads[least] > self._margin:
                rank = least
            self._pins[key] = processes[rank]
            self._keys[id(processes[rank])] += 1
            if len(self._pins) > self._most:
                self._forget(next(iter(self._pins)))
            return rank

    def _forget(self, key: Hashable) -> object:
        process = self._pins.pop(key, None)
        if process is not None:
            self._keys[id(process)] -= 1
        return process


def sticky(group: GroupView, key: Hashable, *, margin: float = _MARGIN) -> RankView:
    """Return a view that sends the calls of a conversation to a fixed rank: ``sticky(group, key).generate(prompt)``.

    The first call goes to the least busy rank, and later calls to the same rank. The key moves to the least busy rank
    if its own rank has over ``margin`` more calls in flight, or if the process of its rank died or was replaced. For a
    method with a mesh mode, a rank means its dp coordinate.

    Args:
        group: a group whose ranks serve independently.
        key: hashable id of the conversation.
        margin: number of additional calls in flight for which a conversation still waits, to reuse its caches.

    Raises:
        DeclarationError: if ``margin`` is negative.
    """
    if margin < 0:
        raise DeclarationError(f"px.engines.sticky(margin={margin!r}): expected 0 or more calls")
    pins = group.core.pins.setdefault((group.role, margin), Pins(margin))
    selection = group._selection  # pyright: ignore[reportPrivateUsage]
    return RankView(replace(selection, which="any", pin=partial(pins.rank_of, key)))
