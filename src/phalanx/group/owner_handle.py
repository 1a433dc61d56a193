"""What the owner of a group can do with its ranks, and what brings weights to those that are new."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from phalanx.group.epoch import GroupState
from phalanx.group.roster import Change

__all__ = ["OwnerHandle", "Resync"]


class Resync(Protocol):
    """Resync weights to a group, and so to ranks of it that are new: a sync of which it is a target."""

    def newest(self, key: tuple[str, str]) -> int | None:
        """The newest version that it sent to weights of that role and name; 0: none yet; None: it does not go there."""
        ...

    def doubt(self) -> str:
        """Why the source may not have the weights any more that it had, in words; "" where it has."""
        ...

    def mend_source(self) -> None:
        """Have its source mended, if that is broken and has a policy that says so."""
        ...

    def bring(self, to: GroupState) -> None:
        """Bring the source's present weights to all ranks that there are of a target, those that join it too.

        Other targets get them if they take calls now. One that does not gets them with what mends it, and one that
        stops to take calls meanwhile, since another thread replaces its ranks, is left out.

        Raises:
            PhalanxError: they did not get there.
        """
        ...


@dataclass(frozen=True)
class OwnerHandle:
    """What the process that made a group can do with its processes."""

    #: Replaces ranks, and brings states back between their constructors and the next call.
    replace: Callable[[Collection[int], Callable[[], None]], None]
    #: Gives the group more ranks or fewer while it works.
    resize: Callable[[Change, float | None], None]
    #: Starts it anew with so many ranks.
    restart: Callable[[int], None]
    #: Resync a broken group back, or ranks away from nodes that go, as its policy says; None where it has none.
    revive: Callable[[], None] | None
