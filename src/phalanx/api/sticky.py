"""``px.engines.sticky``: the calls of a key go to the same rank of a serving group, whose caches know it."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from phalanx.api.methods import BoundMethod
from phalanx.api.view import GroupView
from phalanx.errors import DeclarationError, WorkerDiedError

_MARGIN = 2.0
_MOST_KEYS = 100_000


class Pins:
    """The process that each key of a group is pinned to. A replaced process counts as a new rank."""

    def __init__(self, margin: float, most: int = _MOST_KEYS) -> None:
        self._margin = margin
        self._most = most  # the key not asked for longest is forgotten first
        self._pins: OrderedDict[Hashable, object] = OrderedDict()
        self._keys: Counter[int] = Counter()  # by the id of their process, which the pins keep
        self._lock = threading.Lock()

    def rank_of(self, key: Hashable, loads: Mapping[int, int], processes: Sequence[object]) -> int:
        """Return the rank for a key, given the in-flight calls on each living rank. The key is pinned there.

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


class Sticky:
    """A group as a single key sees it: looking up a method returns the method of the key's rank."""

    def __init__(self, group: GroupView, key: Hashable, pins: Pins) -> None:
        self._group = group
        self._key = key
        self._pins = pins

    def __getattr__(self, name: str) -> BoundMethod[..., Any, Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        group = self._group
        spec = group.methods.get(name)
        if spec is None:
            return getattr(group, name)  # raises an error that lists the existing methods
        processes = group.core.epoch.endpoints
        loads = group._selection.loads(spec)  # pyright: ignore[reportPrivateUsage]
        if not loads:
            raise WorkerDiedError(
                f"group {group.name!r}, {name}: no rank lives that a call could go to; restart the group",
                group=group.name,
                method=name,
            )
        rank = self._pins.rank_of(self._key, loads, processes)
        return getattr(group[group.ranks.index(rank)], name)

    def __repr__(self) -> str:
        return f"<{self._group.name} for {self._key!r}>"


def sticky(group: GroupView, key: Hashable, *, margin: float = _MARGIN) -> Sticky:
    """Return the group for a conversation: ``px.engines.sticky(group, key).generate(prompt)`` goes to a fixed rank.

    It is the rank to which the key went before; at first, the least busy rank. The key moves to the least busy rank if
    its own rank has over ``margin`` more calls in flight, or if the process of its own rank died or was replaced. Of a
    method with a mesh mode, a rank stands for its dp coordinate.

    Args:
        group: a group whose ranks serve independently.
        key: names the conversation; anything hashable.
        margin: number of additional in-flight calls that the caches of a conversation are worth waiting for.

    Raises:
        DeclarationError: ``margin`` is negative.
        WorkerDiedError: every rank was lost; raised when the method is looked up.
    """
    if margin < 0:
        raise DeclarationError(f"px.engines.sticky(margin={margin!r}): expected 0 or more calls")
    return Sticky(group, key, group.core.pins.setdefault((group.role, margin), Pins(margin)))
