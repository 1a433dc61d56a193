"""Rows dealt out such that every part has about the same total length."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.compat.verl._proto.errors import require
from phalanx.topology.balance import balanced_partition

__all__ = ["get_seqlen_balanced_partitions"]


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Row numbers, ascending, for each of ``k_partitions`` parts, none of them empty.

    With ``equal_size`` all parts have the same number of rows. The largest sum of lengths is kept small, as
    `phalanx.topology.balance` describes it.

    Raises:
        Refused: there are fewer rows than parts, or with ``equal_size`` they do not divide evenly.
    """
    rows = len(seqlen_list)
    require(
        0 < k_partitions <= rows,
        f"{rows} rows cannot be dealt out to {k_partitions} parts with a row in each",
    )
    require(
        not equal_size or rows % k_partitions == 0,
        f"{rows} rows do not divide into {k_partitions} parts of equal size",
    )
    return balanced_partition(list(seqlen_list), k_partitions, equal_counts=equal_size)
