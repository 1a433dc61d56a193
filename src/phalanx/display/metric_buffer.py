"""Counts for monitoring: kept here by whoever makes calls, drained now and then by whoever exports them.

A call costs one append while an exporter is there, and one look at an attribute otherwise.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

_WAITING = 100_000


class Ended(NamedTuple):
    """One call that is over; ``seconds`` from its sending to its value or error."""

    group: str
    method: str
    seconds: float
    failed: bool


class Bytes(Protocol):
    """What a group has moved since it was made."""

    @property
    def sent_bytes(self) -> int: ...
    @property
    def stored_bytes(self) -> int: ...
    @property
    def fetched_bytes(self) -> int: ...


class Moved(NamedTuple):
    """Bytes that a group moved since the last time: "sent" in messages, "stored", "fetched"."""

    group: str
    kind: str
    nbytes: int


class MetricBuffer:
    """What waits to be exported. ``on`` is True once somebody exports; of very many calls the oldest are forgotten."""

    def __init__(self) -> None:
        self.on = False
        self._ended: deque[Ended] = deque(maxlen=_WAITING)
        self._groups: list[tuple[str, Bytes, dict[str, int]]] = []

    def watch(self, group: str, counts: Bytes) -> None:
        """From now on, look at the bytes of a group."""
        self._groups.append((group, counts, {}))

    def ended(self, group: str, method: str, seconds: float, failed: bool) -> None:
        """Note a call that is over."""
        self._ended.append(Ended(group, method, seconds, failed))

    def drain(self) -> tuple[list[Ended], list[Moved]]:
        """What came since the last time."""
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        moved: list[Moved] = []
        for group, counts, told in list(self._groups):
            for kind in ("sent", "stored", "fetched"):
                total: int = getattr(counts, f"{kind}_bytes")
                if total > told.get(kind, 0):
                    moved.append(Moved(group, kind, total - told.get(kind, 0)))
                    told[kind] = total
        return ended, moved


meters = MetricBuffer()
