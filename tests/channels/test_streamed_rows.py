"""Rows that ranks yield one by one come to the caller once each, at their places in the call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.calls.streams import RowFault, StreamedRow, StreamedRows


def two_pieces() -> StreamedRows:
    return StreamedRows(rows=[2, 3], ranks=[0, 4])


def test_a_row_has_its_place_in_the_call() -> None:
    rows = two_pieces()

    assert rows.receive(4, (0, "x")) == StreamedRow(2, "x")
    assert rows.receive(0, (1, "y")) == StreamedRow(1, "y")


def test_rows_dealt_out_of_order_come_to_the_places_that_the_caller_knows() -> None:
    rows = StreamedRows(rows=[2, 2], ranks=[0, 1], order=[3, 0, 2, 1])

    assert [rows.receive(rank, (index, None)) for rank in (0, 1) for index in (0, 1)] == [
        StreamedRow(3, None),
        StreamedRow(0, None),
        StreamedRow(2, None),
        StreamedRow(1, None),
    ]


def test_padded_rows_are_let_go_of_and_may_be_left_out() -> None:
    rows = StreamedRows(rows=[1], ranks=[0], given=[4])

    assert rows.receive(0, (0, "real")) == StreamedRow(0, "real")
    assert rows.receive(0, (3, "padded")) is None
    assert rows.finish(0) is None


def test_a_row_yielded_twice_is_a_fault_of_its_rank() -> None:
    rows = two_pieces()
    rows.receive(4, (1, "x"))

    fault = rows.receive(4, (1, "x again"))

    assert fault == RowFault(4, "it yielded row 1 of its piece twice: yield every row once")


def test_a_row_missing_at_the_end_is_a_fault_that_names_it() -> None:
    rows = two_pieces()
    rows.receive(4, (1, "x"))

    fault = rows.finish(4)

    assert isinstance(fault, RowFault)
    assert fault.message.startswith("it ended without 2 of the 3 rows of its piece (0, 2)")


@pytest.mark.parametrize("index", [-1, 2])
def test_a_row_outside_the_piece_is_a_fault(index: int) -> None:
    fault = two_pieces().receive(0, (index, "x"))

    assert fault == RowFault(0, f"it yielded row {index} of a piece of 2 rows: count from 0")


@pytest.mark.parametrize("item", ["text", (1, 2, 3), (True, "x"), (1.0, "x"), None, [0, "x"]])
def test_what_is_not_an_index_with_a_result_is_a_fault(item: Any) -> None:
    fault = two_pieces().receive(0, item)

    assert isinstance(fault, RowFault)
    assert "yield (index of the row in its piece, result)" in fault.message


def test_an_index_may_be_an_integer_of_numpy() -> None:
    assert two_pieces().receive(4, (np.int64(1), "x")) == StreamedRow(3, "x")


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_whatever_the_order_of_arrival_every_row_of_the_call_comes_once(
    sizes: list[int], chance: Any
) -> None:
    rows = StreamedRows(sizes, ranks=range(len(sizes)))
    items = [(rank, index) for rank, size in enumerate(sizes) for index in range(size)]
    chance.shuffle(items)

    received = [rows.receive(rank, (index, None)) for rank, index in items]

    assert sorted(row.index for row in received if isinstance(row, StreamedRow)) == list(range(sum(sizes)))
    assert not [fault for rank in range(len(sizes)) if (fault := rows.finish(rank))]
