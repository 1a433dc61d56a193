"""``px.Elastic``: how many ranks a group should have, from what waits for them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.errors import DeclarationError


@dataclass(frozen=True)
class Load:
    """What a decision is made from.

    ``queued`` items wait in the queue, ``busy`` calls are under way on the group's ranks, of which there are ``ranks``
    (engines, where one is several ranks); ``now`` is in seconds, on a clock that only goes forward.
    """

    queued: int
    busy: int
    ranks: int
    now: float = 0.0


@dataclass(frozen=True)
class Wish:
    """A smaller size that was decided for: the largest since ``since``, in seconds."""

    size: int
    since: float


def one_per(work: int) -> Callable[[Load], int]:
    """A decision: a rank for each ``work`` items that wait or calls that are under way.

    Raises:
        DeclarationError: ``work`` is below 1.
    """
    if isinstance(work, bool) or not isinstance(work, int) or work < 1:
        raise DeclarationError(
            f"px.Elastic(..., decide={work!r}): expected a whole number from 1, or a function"
        )
    return lambda load: math.ceil((load.queued + load.busy) / work)


@dataclass(frozen=True)
class Elastic:
    """Between ``min`` and ``max`` ranks, by a decision: ``px.Elastic(1, 8, decide=4)``.

    More ranks are taken at once; fewer only when the decision was for fewer for ``shrink_after_s`` seconds on end, and
    then as many as the largest of these decisions: a group does not shrink for a moment in which nothing waits.
    ``px.adapt(group, elastic, queue)`` looks, decides and resizes.

    Args:
        min, max: the bounds, 1 or more.
        decide: a function of a ``Load`` (``queued``, ``busy``, ``ranks``, ``now``) that gives a number of ranks, or a
            whole number: so many items that wait, or calls under way, for each rank.
        shrink_after_s: seconds.

    Raises:
        DeclarationError: bounds or numbers that make no sense.
    """

    min: int
    max: int
    decide: Callable[[Load], int] | int = 1
    shrink_after_s: float = 60.0

    def __post_init__(self) -> None:
        for name, value in (("min", self.min), ("max", self.max)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise DeclarationError(f"px.Elastic({name}={value!r}): expected a whole number from 1")
        if self.max < self.min:
            raise DeclarationError(f"px.Elastic(min={self.min}, max={self.max}): max is less than min")
        seconds = self.shrink_after_s
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
            raise DeclarationError(f"px.Elastic(shrink_after_s={seconds!r}): expected seconds, 0 or more")
        if not callable(self.decide):
            one_per(self.decide)

    def wanted(self, load: Load) -> int:
        """What the decision is, within the bounds.

        Raises:
            DeclarationError: the function gives no whole number.
        """
        decide = self.decide if callable(self.decide) else one_per(self.decide)
        size = decide(load)
        if isinstance(size, bool) or not isinstance(size, int):
            raise DeclarationError(
                f"px.Elastic: decide({load}) gave {size!r}; expected a whole number of ranks"
            )
        return max(self.min, min(self.max, size))

    def next_size(self, load: Load, wish: Wish | None) -> tuple[int, Wish | None]:
        """How many ranks the group should have now, and the wish for fewer to be remembered until the next look."""
        wanted = self.wanted(load)
        if wanted > load.ranks:
            return wanted, None
        if wanted == load.ranks:
            return wanted, None
        held = Wish(wanted, load.now) if wish is None else Wish(max(wanted, wish.size), wish.since)
        if load.now - held.since >= self.shrink_after_s:
            return held.size, None
        return load.ranks, held
