"""Partition of rows into parts of even total length, for dispatch that balances work over dp ranks."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any

from phalanx.errors import DispatchError


def balanced_partition(
    lengths: Sequence[float], parts: int, *, group_size: int = 1, equal_counts: bool = False
) -> list[list[int]]:
    """Return row indices for each of ``parts`` parts, such that the largest sum of lengths is small.

    ``group_size`` consecutive rows stay together (the samples of a prompt). With ``equal_counts`` the parts' numbers of
    groups differ by at most 1. Rows ascend within a part, parts ascend by their first row, empty parts (fewer rows than
    parts) come last. The same input always returns the same partition.

    The rule is longest first (R. L. Graham, 1969): each group goes to the part with the smallest sum so far. With
    ``equal_counts`` every part gets one group before any part gets the next.

    Raises:
        DispatchError: ``parts`` or ``group_size`` is below 1, rows do not fill whole groups, or a length is
            not a finite number from 0.
    """
    rows = _checked_lengths(lengths)
    _check_counts(len(rows), parts, group_size)
    groups = [(math.fsum(rows[i : i + group_size]), i // group_size) for i in range(0, len(rows), group_size)]
    groups.sort(key=lambda item: (-item[0], item[1]))
    found: list[list[int]] = [[] for _ in range(parts)]
    # The count settles ties, so rows of length 0 are spread too.
    totals = [(0.0, 0, part) for part in range(parts)]
    step = parts if equal_counts else 1
    for start in range(0, len(groups), step):
        layer = groups[start : start + step]
        lightest = [heapq.heappop(totals) for _ in layer]
        for (length, group), (total, count, part) in zip(layer, lightest, strict=True):
            found[part].append(group)
            heapq.heappush(totals, (total + length, count + 1, part))
    members = sorted((sorted(part) for part in found), key=lambda part: part[0] if part else len(rows))
    return [[g * group_size + i for g in part for i in range(group_size)] for part in members]


def _checked_lengths(lengths: Any) -> list[float]:
    given: list[Any] = lengths.tolist() if hasattr(lengths, "tolist") else list(lengths)
    for row, length in enumerate(given):
        if isinstance(length, bool) or not isinstance(length, int | float) or not 0 <= length < math.inf:
            raise DispatchError(
                f"the length of row {row} is {length!r:.80}; expected one finite number from 0 for each row"
            )
    return given


def _check_counts(rows: int, parts: int, group_size: int) -> None:
    if parts < 1 or group_size < 1:
        raise DispatchError(
            f"a partition into parts={parts} with group_size={group_size}; expected whole numbers from 1"
        )
    if rows % group_size:
        raise DispatchError(
            f"{rows} rows do not fill whole groups of group_size={group_size}; pass a multiple of "
            f"{group_size} rows, or group_size=1 where rows need not stay together"
        )
