"""Streams of rows: each row of a call arrives as soon as its rank has finished it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest

import phalanx as px
from phalanx.api import methods


class Rows(px.Worker):
    @px.register(px.Dispatch.ROWS)
    def backwards(self, rows: list[int]) -> Iterator[tuple[int, int]]:
        for index in numpy.arange(len(rows))[::-1]:
            yield index, 10 * rows[index]

    @px.register(px.Dispatch.ROWS, pad_to_multiple=2)
    def padded(self, rows: list[int]) -> Iterator[tuple[int, int]]:
        yield from enumerate(rows)

    @px.register(px.Dispatch.ROWS, pad_to_multiple=2)
    def real(self, rows: list[int], ids: list[int]) -> Iterator[tuple[int, int]]:
        yield from ((index, rows[index]) for index in range(len(set(ids))))

    @px.register(px.Dispatch.mesh(balance=lambda rows: rows))
    def balanced(self, rows: list[int]) -> Iterator[tuple[int, int]]:
        yield from enumerate(rows)

    @px.register(px.Dispatch.ROWS)
    def twice(self, rows: list[int]) -> Iterator[tuple[int, int]]:
        yield 0, rows[0]
        yield 0, rows[0]

    @px.register(px.Dispatch.ROWS)
    def some(self, rows: list[int]) -> Iterator[tuple[int, int]]:
        yield 1, rows[1]

    @px.register(px.Dispatch.ROWS)
    def values(self, rows: list[Any]) -> Iterator[Any]:
        yield from rows

    @px.register(px.Dispatch.ROWS, pad_to_multiple=2)
    def padded_scores(self, rows: list[int]) -> list[int]:
        return rows

    @px.register
    def ping(self) -> int:
        return self.rank


@pytest.fixture(scope="module")
def group(pool: px.ResourcePool) -> Any:
    return px.WorkerGroup(pool, Rows, mesh=px.Mesh(dp=2, tp=2))


@pytest.mark.parametrize("count", [1, 4, 11])
def test_each_row_is_streamed_once_with_its_index_in_the_call(group: Any, count: int) -> None:
    rows, long = list(range(count)), [9, 1, 1, 1, 8, 1]

    assert sorted(group.backwards.stream(rows, by="rows")) == [(row, 10 * row) for row in rows]
    assert sorted(group.padded.stream(rows, by="rows")) == list(enumerate(rows))
    assert sorted(group.real.stream(rows, list(range(len(rows))), by="rows")) == list(enumerate(rows))
    assert sorted(group.balanced.stream(long, by="rows")) == list(enumerate(long))


def test_streamed_outputs_have_no_padding_rows(group: Any) -> None:
    outputs = dict(group.padded_scores.stream(list(range(5))))

    assert [row for rank in range(4) for row in outputs[rank]] == list(range(5))


@pytest.mark.parametrize(
    ("method", "row", "fault"),
    [
        ("twice", 1, "row 0 of its shard twice: yield every row once"),
        ("some", 1, r"it ended without 2 of the 3 rows of its shard \(0, 2\)"),
        ("values", (-1, "x"), "row -1 of a shard of 3 rows: count from 0"),
        ("values", (3, "x"), "row 3 of a shard of 3 rows: count from 0"),
        *(
            ("values", row, r"yield \(index of the row in its shard, result\)")
            for row in ("text", (1, 2, 3), (True, "x"), (1.0, "x"), None, [0, "x"])
        ),
    ],
)
def test_missing_repeated_and_invalid_rows_of_a_stream_are_errors(
    group: Any, method: str, row: Any, fault: str
) -> None:
    with pytest.raises(px.RemoteCallError, match=fault) as raised:
        list(getattr(group, method).stream([row] * 12, by="rows"))

    assert isinstance(raised.value, ValueError)
    assert group.ping() == [0, 1, 2, 3]


def test_a_stream_by_rows_without_split_rows_is_refused(group: Any) -> None:
    for view in (group[0], group.any):
        with pytest.raises(px.DispatchError, match=r'by="rows"\): no rows are split'):
            view.values.stream([1, 2], by="rows")


class Alone(Rows):
    independent = True


def test_a_stream_that_is_planned_again_after_a_resize_has_each_row_once(
    here: px.ResourcePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    group: Any = px.WorkerGroup(here, Alone)
    send = methods.send

    def resized_first(*args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        px.resize(group, 2)
        return send(*args, **options)

    monkeypatch.setattr(methods, "send", resized_first)

    assert sorted(group.backwards.stream([0, 1, 2, 3], by="rows")) == [(0, 0), (1, 10), (2, 20), (3, 30)]
