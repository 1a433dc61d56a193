"""The ranks of one side of a sync, and how they are asked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx.calls.call import Call
from phalanx.calls.run_on import run_on
from phalanx.errors import DeclarationError, PhalanxError
from phalanx.group.group import Group
from phalanx.weights.worker.weight_requests import Asked, Side
from phalanx.wire.value import Value

__all__ = ["Ranks", "SyncSide", "all_in_order", "ask_each", "send_to", "side_of"]


class Ranks(Protocol):
    """A group, a role of one, or some of its ranks."""

    @property
    def core(self) -> Group: ...
    @property
    def role(self) -> str: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def name(self) -> str: ...


@dataclass(frozen=True, eq=False)
class SyncSide:
    """Ranks that publish, or accept, weights under a name."""

    core: Group
    fixed: tuple[int, ...] | None
    asked: Asked
    title: str

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks; of a whole group, those that it has now, and those that join it."""
        return self.core.epoch.reached if self.fixed is None else self.fixed

    @property
    def key(self) -> tuple[str, str]:
        """Role and name."""
        return self.asked.role, self.asked.name


def side_of(given: Ranks, side: Side, name: str) -> SyncSide:
    """Of a group, or of what else can be called.

    Raises:
        DeclarationError: it is none of these.
    """
    core = getattr(given, "core", None)
    if not isinstance(core, Group):
        raise DeclarationError(
            f"px.WeightSync: the {side} is {given!r}; give a group, a role of it such as group.actor, or some of its "
            "ranks such as group[0:2]"
        )
    whole = tuple(given.ranks) == core.epoch.everyone
    return SyncSide(core, None if whole else tuple(given.ranks), Asked(side, given.role, name), given.name)


def send_to(
    core: Group, ranks: Sequence[int], title: str, function: Callable[..., Any], *args: Value
) -> Call:
    """Have a function of the library run on ranks as a call of its own; gives the list of its outputs by rank.

    No group is mended for it: who holds the lock of a sync must not wait for others who do that.

    Raises:
        GroupClosed, GroupBroken, StaleEpoch: the group takes no calls.
    """
    return run_on(core, function, *args, ranks=ranks, title=title)


def ask_each(core: Group, ranks: Sequence[int], function: Callable[..., Any], *args: Value) -> None:
    """Have a function of the library run on those of the ranks that are there; does not wait, and nothing is raised."""
    if core.closed:
        return
    dead = set(core.epoch.dead(core.transport))
    with contextlib.suppress(PhalanxError):
        there = [rank for rank in ranks if rank not in dead]
        run_on(core, function, *args, ranks=there, title="px.WeightSync", checked=False)


@contextlib.contextmanager
def all_in_order(cores: Sequence[Group]) -> Generator[None]:
    """The time in which calls go to several groups with no other call between them, whichever threads make those.

    Everybody takes the groups in one order, so that nobody waits for another crosswise.
    """
    with contextlib.ExitStack() as held:
        for core in sorted(set(cores), key=lambda core: (core.name, id(core))):
            held.enter_context(core.order)
        yield
