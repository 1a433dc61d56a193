"""Rows that ranks yield one by one come to the caller once each, at their places in the call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.calls.item_stream import RowFault, StreamedRows


def two_pieces() -> StreamedRows:
    return StreamedRows(rows=[2, 3], ranks=[0, 4])


def test_a_row_has_its_place_in_the_call() -> None:
    rows = two_pieces()

    assert rows.receive(4, (0, "x")) == (2, "x")
    assert rows.receive(0, (1, "y")) == (1, "y")


def test_rows_dealt_out_of_order_come_to_the_places_that_the_caller_knows() -> None:
    rows = StreamedRows(rows=[2, 2], ranks=[0, 1], order=[3, 0, 2, 1])

    assert [rows.receive(rank, (index, None)) for rank in (0, 1) for index in (0, 1)] == [
        (3, None),
        (0, None),
        (2, None),
        (1, None),
    ]


def test_padded_rows_are_let_go_of_and_may_be_left_out() -> None:
    rows = StreamedRows(rows=[1], ranks=[0], given=[4])

    assert rows.receive(0, (0, "real")) == (0, "real")
    assert rows.receive(0, (3, "padded")) is None
    rows.finish(0)


def test_a_row_yielded_twice_is_a_fault_of_its_rank() -> None:
    rows = two_pieces()
    rows.receive(4, (1, "x"))

    with pytest.raises(RowFault, match="it yielded row 1 of its piece twice: yield every row once"):
        rows.receive(4, (1, "x again"))


def test_a_row_missing_at_the_end_is_a_fault_that_names_it() -> None:
    rows = two_pieces()
    rows.receive(4, (1, "x"))

    with pytest.raises(RowFault, match=r"it ended without 2 of the 3 rows of its piece \(0, 2\)"):
        rows.finish(4)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_row_outside_the_piece_is_a_fault(index: int) -> None:
    with pytest.raises(RowFault, match=f"it yielded row {index} of a piece of 2 rows: count from 0"):
        two_pieces().receive(0, (index, "x"))


@pytest.mark.parametrize("item", ["text", (1, 2, 3), (True, "x"), (1.0, "x"), None, [0, "x"]])
def test_what_is_not_an_index_with_a_result_is_a_fault(item: Any) -> None:
    with pytest.raises(RowFault, match=r"yield \(index of the row in its piece, result\)"):
        two_pieces().receive(0, item)


def test_an_index_may_be_an_integer_of_numpy() -> None:
    assert two_pieces().receive(4, (np.int64(1), "x")) == (3, "x")


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_whatever_the_order_of_arrival_every_row_of_the_call_comes_once(
    sizes: list[int], chance: Any
) -> None:
    rows = StreamedRows(sizes, ranks=range(len(sizes)))
    items = [(rank, index) for rank, size in enumerate(sizes) for index in range(size)]
    chance.shuffle(items)

    received = [rows.receive(rank, (index, None)) for rank, index in items]

    for rank in range(len(sizes)):
        rows.finish(rank)
    assert sorted(row[0] for row in received if row is not None) == list(range(sum(sizes)))
