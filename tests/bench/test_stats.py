"""The benchmark's statistics and tables on made-up repetitions."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.stats import Case, Goal, Sample, judge, rows_of, summarise

CASE = Case("broadcast", 4, 256)


def samples(**seconds: list[float]) -> list[Sample]:
    names = {"bare": "bare Ray"}
    return [
        Sample(CASE, names.get(name, name), value) for name, values in seconds.items() for value in values
    ]


def test_summary_has_median_extremes_and_quartiles() -> None:
    summary = summarise([5.0, 1.0, 2.0, 4.0, 3.0])
    found = (summary.low, summary.q1, summary.median, summary.q3, summary.high, summary.count)
    assert found == (1.0, 2.0, 3.0, 4.0, 5.0, 5)


def test_one_slow_repetition_does_not_move_the_median() -> None:
    assert summarise([1.0, 1.0, 100.0]).median == 1.0


def test_summary_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one repetition"):
        summarise([])


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=30))
def test_summary_is_ordered(seconds: list[float]) -> None:
    summary = summarise(seconds)
    found = [summary.low, summary.q1, summary.median, summary.q3, summary.high]
    assert all(a <= b + 1e-9 * b for a, b in pairwise(found))


def test_ratio_above_one_means_that_phalanx_is_faster() -> None:
    (row,) = rows_of(samples(phalanx=[1.0, 1.2, 0.8], verl=[8.0, 9.0, 10.0]), {})
    assert row.ratio("verl") == 9.0


def test_ratio_without_a_measurement_is_none() -> None:
    (row,) = rows_of(samples(verl=[8.0]), {})
    assert row.ratio("verl") is None


@pytest.mark.parametrize(("ours", "met"), [(1.0, True), (1.01, False)])
def test_goal_is_judged_on_medians(ours: float, met: bool) -> None:
    summaries = {"phalanx": summarise([ours]), "verl": summarise([8.0])}
    assert judge(Goal("verl", 1 / 8), summaries) is met


def test_goal_against_a_missing_contender_is_not_measured() -> None:
    assert judge(Goal("verl", 1 / 8), {"phalanx": summarise([1.0])}) is None


def test_goal_reads_as_a_bound() -> None:
    assert (Goal("verl", 1 / 8).words(), Goal("floor", 2.0).words()) == (
        ">= 8x faster than verl",
        "<= 2x floor",
    )


def test_rows_keep_the_order_of_measurement() -> None:
    later = Case("broadcast", 2, 1)
    rows = rows_of([Sample(CASE, "phalanx", 1.0), Sample(later, "phalanx", 1.0)], {})
    assert [row.case for row in rows] == [CASE, later]


def test_case_reads_as_words() -> None:
    assert Case("split_gather", 1, 16).label() == "split gather, 1 rank, 16 MB"
