"""``px.engines.sticky``: the calls of one key go to one rank of a serving group, whose caches know it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import Any

from phalanx.api.methods import BoundMethod
from phalanx.api.routing import StickyRouting
from phalanx.api.view import GroupView
from phalanx.backends.backend_types import Endpoint
from phalanx.errors import WorkerDiedError
from phalanx.group.group import Group

_MARGIN = 2.0


class _Pins:
    """The keys of one group, of one margin. A rank whose process was replaced is another one to them."""

    def __init__(self, margin: float) -> None:
        self._routing = StickyRouting(margin)
        self._processes: list[Endpoint] = []
        self._lock = threading.Lock()

    def rank_of(self, group: GroupView, method: str, key: Hashable) -> int:
        """Where a call of that key goes."""
        spec = group.methods.get(method)
        if spec is None:
            getattr(group, method)  # which says what there is
            raise AttributeError(method)
        endpoints = group.core.epoch.endpoints
        loads = group._selection.loads(spec)  # pyright: ignore[reportPrivateUsage]
        if not loads:
            raise WorkerDiedError(
                f"group {group.name!r}, {method}: no rank lives that a call could go to; restart the group",
                group=group.name,
                method=method,
            )
        with self._lock:
            places = {self._number(endpoints[rank]): rank for rank in loads}
            route = self._routing.route(key, {number: loads[rank] for number, rank in places.items()})
            return places[route.rank]

    def _number(self, endpoint: Endpoint) -> int:
        for number, known in enumerate(self._processes):
            if known is endpoint:
                return number
        self._processes.append(endpoint)
        return len(self._processes) - 1


_pins: weakref.WeakKeyDictionary[Group, dict[tuple[str, float], _Pins]] = weakref.WeakKeyDictionary()


class Sticky:
    """A group as one key sees it: each method, when it is looked up, is that of the rank which the key goes to."""

    def __init__(self, group: GroupView, key: Hashable, pins: _Pins) -> None:
        self._group = group
        self._key = key
        self._pins = pins

    def __getattr__(self, name: str) -> BoundMethod[..., Any, Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        rank = self._pins.rank_of(self._group, name, self._key)
        return getattr(self._group[self._group.ranks.index(rank)], name)

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
    of_group = _pins.setdefault(group.core, {})
    place = (group.role, margin)
    if place not in of_group:
        of_group[place] = _Pins(margin)
    return Sticky(group, key, of_group[place])
