"""What whoever made a group can have done to its members; nobody else can."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from phalanx.declare.bind import ClassWithInitArgs
from phalanx.runtime.life.roster import Change


class Joined(Protocol):
    """Brings weights to ranks that have joined a group."""

    def bring(self) -> None:
        """Bring them to all ranks that the group's weights are to reach now."""
        ...


@dataclass(frozen=True)
class Owned:
    """What the process that made a group can do with its processes."""

    #: What the workers are made of, by role.
    made_of: Mapping[str, ClassWithInitArgs]
    #: Replaces ranks, and brings states back between their constructors and the next call.
    replace: Callable[[Collection[int], Callable[[], None]], None]
    #: Gives the group more ranks or fewer while it works.
    resize: Callable[[Change, float | None], None]
    #: Starts it anew with so many ranks.
    restart: Callable[[int], None]
    #: Brings a broken group back, or ranks away from nodes that go, as its policy says; None where it has none.
    revive: Callable[[], None] | None
