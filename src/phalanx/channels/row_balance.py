"""An order of rows such that even pieces of them have about as much work each. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.topology.balance import balanced_partition


def balanced_order(lengths: Sequence[float], pieces: int) -> list[int]:
    """The row for each place: cut evenly into ``pieces``, the larger pieces first, their sums are about equal.

    Raises:
        DispatchError: ``pieces`` is below 1, or a length is not a finite number from 0.
    """
    parts = balanced_partition(lengths, pieces, equal_counts=True)
    return [row for part in sorted(parts, key=len, reverse=True) for row in part]


def runs_of(rows: Sequence[int]) -> list[tuple[int, int]]:
    """The rows as stretches that ascend by one: first, and one after the last."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs
