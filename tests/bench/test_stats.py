"""The benchmark's statistics and tables on made-up repetitions."""

from __future__ import annotations

import pytest

from bench.stats import Case, Goal, Sample, judge, rows_of, summarise

CASE = Case("broadcast", 4, 256)


def test_summary_has_median_extremes_and_quartiles() -> None:
    summary = summarise([5.0, 1.0, 2.0, 4.0, 3.0])
    found = (summary.low, summary.q1, summary.median, summary.q3, summary.high, summary.count)
    assert found == (1.0, 2.0, 3.0, 4.0, 5.0, 5)
    assert summarise([1.0, 1.0, 100.0]).median == 1.0
    with pytest.raises(ValueError, match="at least one repetition"):
        summarise([])


@pytest.mark.parametrize(
    ("medians", "met"),
    [
        ({"phalanx": 1.0, "verl": 8.0}, True),
        ({"phalanx": 1.01, "verl": 8.0}, False),
        ({"phalanx": 1.0}, None),
    ],
)
def test_goal_is_judged_on_medians(medians: dict[str, float], met: bool | None) -> None:
    assert judge(Goal("verl", 1 / 8), {name: summarise([value]) for name, value in medians.items()}) is met


def test_a_goal_has_a_readable_text() -> None:
    assert Goal("floor", 2.0).words() == "<= 2x floor"


def test_rows_keep_the_order_of_measurement() -> None:
    later = Case("broadcast", 2, 1)
    rows = rows_of([Sample(CASE, "phalanx", 1.0), Sample(later, "phalanx", 1.0)], {})
    assert [row.case for row in rows] == [CASE, later]
