"""The pairs of a sync: its source with each of its targets, as the groups are now."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Sequence

from phalanx.display.tables import Table
from phalanx.errors import GroupError
from phalanx.weights.pair_setup import Pair, PairOptions, make_pair
from phalanx.weights.planning.plan_report import explain_plan
from phalanx.weights.planning.resharding_planner import Plans
from phalanx.weights.sync_sides import SyncSide

__all__ = ["Pairs", "part_dropped", "part_when_dropped"]


class Pairs:
    """Made where they are not there yet, and again when a group has other processes. Not for several threads."""

    def __init__(
        self, source: SyncSide, targets: Sequence[SyncSide], plans: Plans, options: PairOptions
    ) -> None:
        self._source = source
        self._targets = tuple(targets)
        self._plans = plans
        self._options = options
        self._made: dict[SyncSide, Pair] = {}

    def present(self, among: Sequence[SyncSide] | None = None) -> list[Pair]:
        """One for each target, or for some of them, all current a moment ago.

        Raises:
            As :func:`make_pair`.
        """
        targets = self._targets if among is None else among
        try:
            for side in (self._source, *targets):
                side.core.check()
        except GroupError:  # what the other side keeps for it is of no use any more
            self.part()
            raise
        for target in targets:
            pair = self._made.get(target)
            if pair is not None and not pair.current:
                self._part(target)
                pair = None
            if pair is None:
                self._made[target] = make_pair(self._source, target, self._plans, self._options)
        return [self._made[target] for target in targets]

    def has(self, pairs: Sequence[Pair]) -> bool:
        """Whether these are the ones that are there now."""
        return all(self._made.get(pair.target) is pair for pair in pairs)

    def explain(self, name: str) -> Table:
        """What a sync of weights of that name moves.

        Raises:
            As :meth:`present`.
        """
        tables = [
            explain_plan(
                pair.plan,
                movers=pair.movers,
                title=f"weights {name!r}, {self._source.title} to {pair.target.title}",
                delta_base=pair.delta_base if self._options.delta else 0,
            )
            for pair in self.present()
        ]
        if len(tables) == 1:
            return tables[0]
        rows = tuple(row for table in tables for row in table.rows)
        notes = tuple(note for table in tables for note in (table.title, *table.notes))
        return Table(f"weights {name!r} to {len(tables)} groups", tables[0].columns, rows, notes)

    def part(self) -> None:
        """Give all of them back."""
        for target in list(self._made):
            self._part(target)

    def _part(self, target: SyncSide) -> None:
        pair = self._made.pop(target, None)
        if pair is not None:
            pair.part()


_dropped: deque[Pairs] = deque()


def part_when_dropped(pairs: Pairs, owner: object) -> None:
    """Have pairs given back by :func:`part_dropped` once nobody refers to their owner any more.

    Not at once: what collects garbage may be inside of anything, and must not make calls.
    """
    weakref.finalize(owner, _dropped.append, pairs).atexit = False


def part_dropped() -> None:
    """Give the pairs back whose owners were dropped, and not closed."""
    with contextlib.suppress(IndexError):  # there is none left
        while True:
            _dropped.popleft().part()
