"""Metrics of this process, which wait for an exporter, such as Ray's."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, NamedTuple

_WAITING = 100_000


class Ended(NamedTuple):
    """A finished call; ``seconds`` is the time from its start to its value or error."""

    group: str
    method: str
    seconds: float
    failed: bool


class MetricBuffer:
    """Metrics of this process. ``on`` is True with an exporter. Beyond 100,000 calls, the oldest are dropped."""

    def __init__(self) -> None:
        self.on = False
        self._ended: deque[Ended] = deque(maxlen=_WAITING)
        self._groups: list[tuple[weakref.ref[Any], str, Any, dict[str, int]]] = []

    def watch(self, group: Any) -> None:
        """Include the bytes that a group sends, stores and fetches in :meth:`drain`, while the group exists."""
        exported = {"sent": 0, "stored": 0, "fetched": 0}
        self._groups.append((weakref.ref(group), group.name, group.counts, exported))

    def ended(self, group: str, method: str, seconds: float, failed: bool) -> None:
        """Add a finished call."""
        self._ended.append(Ended(group, method, seconds, failed))

    def drain(self) -> tuple[list[Ended], list[tuple[str, str, int]]]:
        """Return the calls and the (group, kind, bytes) since the last drain; kinds: "sent", "stored", "fetched"."""
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        moved: list[tuple[str, str, int]] = []
        for watched in list(self._groups):
            group, name, counts, exported = watched
            if group() is None:
                self._groups.remove(watched)
            for kind, before in list(exported.items()):
                exported[kind] = counts.as_dict()[f"{kind}_bytes"]
                if exported[kind] > before:
                    moved.append((name, kind, exported[kind] - before))
        return ended, moved


meters = MetricBuffer()
