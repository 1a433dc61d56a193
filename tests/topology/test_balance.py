"""Partitions of rows into parts with nearly equal sums."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import DispatchError
from phalanx.topology.balance import balanced_partition

row_lengths = st.lists(st.integers(0, 500), max_size=60)
part_counts = st.integers(1, 9)


def sums(lengths: list[float], parts: list[list[int]]) -> list[float]:
    return [sum(lengths[row] for row in part) for part in parts]


@pytest.mark.parametrize("equal_counts", [False, True])
@pytest.mark.parametrize(("rows", "parts"), [*((1000, parts) for parts in range(2, 17)), (40_000, 16)])
def test_parts_of_log_normal_rows_are_at_most_two_percent_above_the_mean(
    rows: int, parts: int, equal_counts: bool
):
    rng = random.Random(0)
    lengths = [rng.lognormvariate(5.0, 1.0) for _ in range(rows)]

    found = sums(lengths, balanced_partition(lengths, parts, equal_counts=equal_counts))

    assert max(found) <= 1.02 * sum(lengths) / parts


@given(row_lengths, part_counts)
def test_parts_have_every_row_once_and_balance_lengths_or_counts(lengths, parts):
    by_length, by_count = (balanced_partition(lengths, parts, equal_counts=equal) for equal in (False, True))

    for found in (by_length, by_count):
        assert len(found) == parts
        assert sorted(itertools.chain(*found)) == list(range(len(lengths)))
        assert all(part == sorted(part) for part in found)
    assert max(sums(lengths, by_length)) <= sum(lengths) / parts + max(lengths, default=0)
    assert max(map(len, by_count)) - min(map(len, by_count)) <= 1


@given(st.lists(st.integers(0, 500), max_size=20), part_counts, st.integers(1, 4), st.booleans())
def test_rows_of_a_group_stay_together(group_lengths, parts, group_size, equal_counts):
    lengths = [length for length in group_lengths for _ in range(group_size)]

    found = balanced_partition(lengths, parts, group_size=group_size, equal_counts=equal_counts)

    blocks = [part[i : i + group_size] for part in found for i in range(0, len(part), group_size)]
    assert all(block == list(range(block[0], block[0] + group_size)) for block in blocks)
    assert all(block[0] % group_size == 0 for block in blocks)


def test_small_partitions_are_balanced_and_may_have_more_parts_than_rows():
    """Longest first would give sums of 17 and 13."""
    assert sums([8, 7, 6, 5, 4], balanced_partition([8, 7, 6, 5, 4], 2)) in ([14, 16], [16, 14])
    assert balanced_partition([3, 9], 4) == [[0], [1], [], []]


@pytest.mark.parametrize(("lengths", "counts"), [([5] * 17, [4, 4, 4, 5]), ([0] * 8, [2, 2, 2, 2])])
def test_rows_of_equal_length_are_spread_evenly(lengths, counts):
    assert sorted(len(part) for part in balanced_partition(lengths, 4)) == counts


@pytest.mark.parametrize("length", [-1, float("nan"), float("inf"), "3", True])
def test_a_length_that_is_no_finite_number_from_0_is_refused(length):
    with pytest.raises(DispatchError, match="row 1 is"):
        balanced_partition([1, length], 2)
