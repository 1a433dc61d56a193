"""Rows spread so that the parts' sums are even."""

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


def log_normal(count: int, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [rng.lognormvariate(5.0, 1.0) for _ in range(count)]


def sums(lengths: list[float], parts: list[list[int]]) -> list[float]:
    return [sum(lengths[row] for row in part) for part in parts]


@pytest.mark.parametrize("equal_counts", [False, True])
@pytest.mark.parametrize(("rows", "parts"), [*((1000, parts) for parts in range(2, 17)), (40_000, 16)])
def test_log_normal_rows_are_within_two_percent(rows: int, parts: int, equal_counts: bool):
    lengths = log_normal(rows)

    found = sums(lengths, balanced_partition(lengths, parts, equal_counts=equal_counts))

    assert max(found) <= 1.02 * sum(lengths) / parts


@given(row_lengths, part_counts, st.booleans())
def test_every_row_is_in_exactly_one_part_in_ascending_order(lengths, parts, equal_counts):
    found = balanced_partition(lengths, parts, equal_counts=equal_counts)

    assert len(found) == parts
    assert sorted(itertools.chain(*found)) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in found)


@given(row_lengths, part_counts)
def test_no_part_exceeds_the_mean_by_more_than_the_longest_row(lengths, parts):
    found = sums(lengths, balanced_partition(lengths, parts))

    assert max(found) <= sum(lengths) / parts + max(lengths, default=0)


@given(row_lengths, part_counts)
def test_equal_counts_differ_by_at_most_one(lengths, parts):
    counts = [len(part) for part in balanced_partition(lengths, parts, equal_counts=True)]

    assert max(counts) - min(counts) <= 1


@given(st.lists(st.integers(0, 500), max_size=20), part_counts, st.integers(1, 4), st.booleans())
def test_rows_of_a_group_stay_together(group_lengths, parts, group_size, equal_counts):
    lengths = [length for length in group_lengths for _ in range(group_size)]

    found = balanced_partition(lengths, parts, group_size=group_size, equal_counts=equal_counts)

    blocks = [part[i : i + group_size] for part in found for i in range(0, len(part), group_size)]
    assert all(block == list(range(block[0], block[0] + group_size)) for block in blocks)
    assert all(block[0] % group_size == 0 for block in blocks)


def test_two_parts_are_evened_out_where_longest_first_is_not():
    assert sums([8, 7, 6, 5, 4], balanced_partition([8, 7, 6, 5, 4], 2)) in ([14, 16], [16, 14])


@pytest.mark.parametrize(("lengths", "counts"), [([5] * 17, [4, 4, 4, 5]), ([0] * 8, [2, 2, 2, 2])])
def test_rows_of_equal_length_are_spread_evenly(lengths, counts):
    assert sorted(len(part) for part in balanced_partition(lengths, 4)) == counts


def test_more_parts_than_rows_leaves_the_last_ones_empty():
    assert balanced_partition([3, 9], 4) == [[0], [1], [], []]


@pytest.mark.parametrize("length", [-1, float("nan"), float("inf"), "3", True])
def test_a_length_that_is_none_names_its_row(length):
    with pytest.raises(DispatchError, match="row 1 is"):
        balanced_partition([1, length], 2)


@pytest.mark.parametrize(
    ("rows", "parts", "group_size", "words"),
    [
        (7, 2, 2, "7 rows do not fill whole groups of group_size=2"),
        (2, 0, 1, "whole numbers from 1"),
        (2, 2, 0, "whole numbers from 1"),
    ],
)
def test_counts_that_make_no_partition_are_refused(rows: int, parts: int, group_size: int, words: str):
    with pytest.raises(DispatchError, match=words):
        balanced_partition([1] * rows, parts, group_size=group_size)
