"""``px.engines.sticky``: the calls of one key go to one rank of a serving group, whose caches know it."""

from __future__ import annotations

import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from phalanx.api.methods import BoundMethod
from phalanx.api.view import GroupView
from phalanx.errors import DeclarationError, WorkerDiedError
from phalanx.group.group import Group

_MARGIN = 2.0
_MOST_KEYS = 100_000


class Pins:
    """The process that each key of a group goes to. A rank whose process was replaced is another one to them."""

    def __init__(self, margin: float, most: int = _MOST_KEYS) -> None:
        self._margin = margin
        self._most = most  # the key not asked for longest is forgotten first
        self._pins: OrderedDict[Hashable, object] = OrderedDict()
        self._keys: Counter[int] = Counter()  # by the id of their process, which the pins keep
        self._lock = threading.Lock()

    def rank_of(self, key: Hashable, loads: Mapping[int, int], processes: Sequence[object]) -> int:
        """Return the rank for a key, given the calls under way on each rank that lives. The key is pinned there.

        A new key goes to the least busy rank, of several to the one with the fewest keys, then the lowest.
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


_pins: weakref.WeakKeyDictionary[Group, dict[tuple[str, float], Pins]] = weakref.WeakKeyDictionary()


class Sticky:
    """A group as one key sees it: each method, when it is looked up, is that of the rank which the key goes to."""

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
            return getattr(group, name)  # which says what there is
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
    """The group as one conversation sees it: ``px.engines.sticky(group, key).generate(prompt)`` goes to one rank.

    That is the rank to which the key went before; at first, the least busy one. The key moves to the least busy rank
    where its own has more than ``margin`` calls more under way than that, and where its own process is lost or was
    replaced. Of a method with a mesh mode, a rank stands for its dp coordinate.

    Args:
        group: whose ranks serve, each by itself.
        key: names the conversation; anything hashable.
        margin: calls under way that the caches of a conversation are worth waiting for.

    Raises:
        DeclarationError: ``margin`` is negative.
        WorkerDiedError: no rank lives; raised where the method is looked up.
    """
    if margin < 0:
        raise DeclarationError(f"px.engines.sticky(margin={margin!r}): expected 0 or more calls")
    of_group = _pins.setdefault(group.core, {})
    place = (group.role, margin)
    if place not in of_group:
        of_group[place] = Pins(margin)
    return Sticky(group, key, of_group[place])
