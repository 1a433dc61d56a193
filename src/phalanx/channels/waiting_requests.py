"""The puts and takes that wait at a channel, in order of arrival."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable

from phalanx.channels.channel_messages import Put, Take
from phalanx.errors import InternalError


class Requests:
    """Each with the time of its arrival, in seconds of the caller's clock; the first in each line goes first."""

    def __init__(self) -> None:
        self._puts: dict[Hashable, tuple[Put, float]] = {}
        self._takes: dict[Hashable, tuple[Take, float]] = {}
        self._nothing_due_before = math.inf

    @property
    def puts(self) -> list[Put]:
        return [put for put, _ in self._puts.values()]

    @property
    def takes(self) -> list[Take]:
        return [take for take, _ in self._takes.values()]

    @property
    def first_put(self) -> Put | None:
        return next((put for put, _ in self._puts.values()), None)

    @property
    def first_take(self) -> Take | None:
        return next((take for take, _ in self._takes.values()), None)

    @property
    def wake_at(self) -> float | None:
        """The earliest deadline."""
        if self._nothing_due_before == math.inf:
            return None
        deadlines = (request.deadline for request in (*self.puts, *self.takes))
        return min((each for each in deadlines if each is not None), default=None)

    def add(self, request: Put | Take, now: float) -> None:
        """Last in its line.

        Raises:
            InternalError: its ticket is that of another that waits.
        """
        if request.ticket in self._puts or request.ticket in self._takes:
            raise InternalError(
                f"ticket {request.ticket!r} at a channel is that of another request that waits"
            )
        if request.deadline is not None:
            self._nothing_due_before = min(self._nothing_due_before, request.deadline)
        if isinstance(request, Put):
            self._puts[request.ticket] = (request, now)
        else:
            self._takes[request.ticket] = (request, now)

    def remove(self, ticket: Hashable) -> bool:
        """Whether it waited."""
        return bool(self._puts.pop(ticket, None) or self._takes.pop(ticket, None))

    def pop_due(self, now: float) -> Put | Take | None:
        """The first take, then the first put, whose deadline is not after `now`; it waits no longer."""
        if now < self._nothing_due_before:
            return None
        for request in (*self.takes, *self.puts):
            if request.deadline is not None and request.deadline <= now:
                self.remove(request.ticket)
                return request
        earliest = self.wake_at
        self._nothing_due_before = math.inf if earliest is None else earliest
        return None

    def remove_of(self, process: str) -> int:
        """All requests of a process, and puts whose bytes it has; how many puts these were."""
        puts = [put for put in self.puts if process in (put.producer, put.holder)]
        takes = [take for take in self.takes if take.consumer == process]
        for request in (*puts, *takes):
            self.remove(request.ticket)
        return len(puts)

    def remove_all(self) -> tuple[list[Put], list[Take]]:
        puts, takes = self.puts, self.takes
        self._puts.clear()
        self._takes.clear()
        return puts, takes

    def ages(self, now: float) -> tuple[float, float]:
        """Seconds that the oldest put, and the oldest take, have waited; 0 where none waits."""
        return _oldest(self._puts.values(), now), _oldest(self._takes.values(), now)


def _oldest(requests: Iterable[tuple[Put | Take, float]], now: float) -> float:
    return max((now - at for _, at in requests), default=0.0)
