"""Rows that ranks yield one by one come to the caller once each, at their places in the call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.calls.item_stream import RowFault, StreamedRows


def test_padded_rows_are_let_go_of_and_may_be_left_out() -> None:
    rows = StreamedRows(rows=[1], ranks=[0], given=[4])

    assert rows.receive(0, (0, "real")) == (0, "real")
    assert rows.receive(0, (3, "padded")) is None
    rows.finish(0)


@pytest.mark.parametrize(
    ("items", "fault"),
    [
        ([(1, "x"), (1, "again")], "it yielded row 1 of its piece twice: yield every row once"),
        ([(-1, "x")], "it yielded row -1 of a piece of 3 rows: count from 0"),
        ([(3, "x")], "it yielded row 3 of a piece of 3 rows: count from 0"),
        *(
            ([item], r"yield \(index of the row in its piece, result\)")
            for item in ("text", (1, 2, 3), (True, "x"), (1.0, "x"), None, [0, "x"])
        ),
    ],
)
def test_an_item_that_is_no_new_row_of_the_piece_is_a_fault_of_its_rank(items: list[Any], fault: str) -> None:
    rows = StreamedRows(rows=[2, 3], ranks=[0, 4])

    with pytest.raises(RowFault, match=fault):
        for item in items:
            rows.receive(4, item)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_whatever_the_order_of_arrival_every_row_comes_once_to_its_place(
    sizes: list[int], chance: Any
) -> None:
    order = chance.sample(range(sum(sizes)), sum(sizes))
    rows = StreamedRows(sizes, ranks=range(len(sizes)), order=chance.choice([order, None]))
    items = [(rank, np.int64(index)) for rank, size in enumerate(sizes) for index in range(size)]
    chance.shuffle(items)

    received = [rows.receive(rank, (index, None)) for rank, index in items]

    for rank in range(len(sizes)):
        rows.finish(rank)
    assert sorted(row[0] for row in received if row is not None) == list(range(sum(sizes)))


def test_rows_missing_at_the_end_are_a_fault_that_names_them() -> None:
    rows = StreamedRows(rows=[2, 3], ranks=[0, 4])
    rows.receive(4, (1, "x"))

    with pytest.raises(RowFault, match=r"it ended without 2 of the 3 rows of its piece \(0, 2\)"):
        rows.finish(4)
