"""What a change of a group's size means, decided before anything is done. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import DeclarationError, PlacementError


@dataclass(frozen=True)
class Change:
    """The ranks that join, and those that leave, in the order in which they do: the highest first."""

    joining: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()


def plan_change(group: str, present: int, wanted: object, slots: int) -> Change:
    """What it takes for a group of ``present`` ranks to have ``wanted``, on a pool of so many slots.

    Raises:
        DeclarationError: that is no number of ranks.
        PlacementError: the pool has fewer slots.
    """
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise DeclarationError(
            f"px.resize({group}, {wanted!r}): expected a number of ranks, 1 or more; close() ends a group"
        )
    if wanted > slots:
        raise PlacementError(
            f"px.resize({group}, {wanted}): its pool has {slots} slots; pool.grow({wanted - slots}) reserves more, or "
            "give a smaller number"
        )
    return Change(tuple(range(present, wanted)), tuple(range(present - 1, wanted - 1, -1)))
