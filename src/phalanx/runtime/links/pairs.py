"""The pairs of a sync: its source with each of its targets, as the groups are now."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.errors import GroupError
from phalanx.runtime.links.pairing import Pair, PairOptions, make_pair
from phalanx.runtime.links.sides import WeightsSide
from phalanx.transfer.planner import Plans

__all__ = ["Pairs"]


class Pairs:
    """Made where they are not there yet, and again when a group has other processes. Not for several threads."""

    def __init__(
        self, source: WeightsSide, targets: Sequence[WeightsSide], plans: Plans, options: PairOptions
    ) -> None:
        self._source = source
        self._targets = tuple(targets)
        self._plans = plans
        self._options = options
        self._made: dict[WeightsSide, Pair] = {}

    def present(self) -> list[Pair]:
        """One for each target, all current a moment ago.

        Raises:
            As :func:`make_pair`.
        """
        try:
            for side in (self._source, *self._targets):
                side.core.check(mend=False)
        except GroupError:  # what the other side keeps for it is of no use any more
            self.part()
            raise
        for target in self._targets:
            pair = self._made.get(target)
            if pair is not None and not pair.current:
                self._part(target)
                pair = None
            if pair is None:
                self._made[target] = make_pair(self._source, target, self._plans, self._options)
        return [self._made[target] for target in self._targets]

    def has(self, pairs: Sequence[Pair]) -> bool:
        """Whether these are the ones that are there now."""
        return list(self._made.values()) == list(pairs)

    def part(self) -> None:
        """Give all of them back."""
        for target in list(self._made):
            self._part(target)

    def _part(self, target: WeightsSide) -> None:
        pair = self._made.pop(target, None)
        if pair is not None:
            pair.part()
