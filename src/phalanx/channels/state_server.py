"""What the homes of channels and of stalenesses have in common: a machine, a clock, and who is to be answered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from phalanx.channels.services import Answer, Peer

Follow = tuple[str, Any]
"""The key of a staleness, and what it calls the rows of an item."""


@runtime_checkable
class Follower(Protocol):
    """What follows rows through channels of its process."""

    def follow(self, channel: str, number: int, lies: Any) -> bool:
        """Rows are an item of a channel now; False where they are not wanted any more."""
        ...


class Machine(Protocol):
    """A state machine."""

    @property
    def wake_at(self) -> float | None:
        """When its next deadline passes: it is to be told then."""
        ...


M = TypeVar("M", bound=Machine)


class Home(Generic[M]):
    """A machine that others ask, each request with a ticket; all of it is done under one lock.

    ``due_sooner`` is called when a deadline comes up that nobody knows of yet.
    """

    def __init__(
        self, key: str, machine: M, clock: Callable[[], float], due_sooner: Callable[[], None]
    ) -> None:
        self._key = key
        self._machine = machine
        self._clock = clock
        self._due_sooner = due_sooner
        self._lock = threading.RLock()
        self._answers: dict[Hashable, Answer] = {}
        self._peers: dict[str, Peer] = {}

    @property
    def key(self) -> str:
        """Its name among all services of this process."""
        return self._key

    def tick(self) -> float | None:
        """Answer those whose deadline is over; seconds until the next one, None if there is none."""
        with self._lock:
            due = self._machine.wake_at
            if due is not None and due <= self._clock():
                self._expire()
                due = self._machine.wake_at
            return None if due is None else max(0.0, due - self._clock())

    def _expire(self) -> None:
        """Tell the machine that a deadline is over."""
        raise NotImplementedError

    def _until(self, timeout: float | None) -> float | None:
        """The deadline of a request that waits so many seconds."""
        if timeout is None:
            return None
        self._due_sooner()
        return self._clock() + timeout

    def _answer(self, ticket: Hashable, what: Any) -> None:
        """Answer a request, once; nobody may be there to hear it any more."""
        answer = self._answers.pop(ticket, None)
        if answer is not None:
            answer(what)


def is_of(ticket: Hashable, name: str) -> bool:
    """Whether a ticket is of the peer of that name."""
    return isinstance(ticket, tuple) and ticket[0] == name
