"""Rows in an order that makes even pieces equal in work."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.channels.row_balance import balanced_order, runs_of
from phalanx.dispatch.split import even_sizes


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8))
def test_every_row_is_there_once_and_no_piece_is_worse_than_its_share_and_one_row(
    lengths: list[int], pieces: int
) -> None:
    order = balanced_order(lengths, pieces)
    assert sorted(order) == list(range(len(lengths)))
    begin, sums = 0, list[int]()
    for size in even_sizes(len(lengths), pieces):
        sums.append(sum(lengths[row] for row in order[begin : begin + size]))
        begin += size
    assert max(sums) <= sum(lengths) / pieces + 2 * max(lengths, default=0)


@given(st.lists(st.integers(0, 50)))
def test_runs_are_the_same_rows(rows: list[int]) -> None:
    assert [row for start, stop in runs_of(rows) for row in range(start, stop)] == rows
    assert all(start < stop for start, stop in runs_of(rows))
