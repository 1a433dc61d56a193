"""The benchmark's statistics on made-up repetitions, their rows as table cells, and the table's place in a page."""

from __future__ import annotations

import pytest

from bench.accounts import PeakWatch
from bench.stats import Case, Goal, Sample, judge, rows_of, summarise
from bench.table import (
    cells,
    duration,
    headings,
    markdown_table,
    measured,
    page_tables,
    replace_between_markers,
    with_spread,
)

CASE = Case("empty_call", 8)


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
def test_a_goal_is_judged_on_medians_and_has_a_readable_text(
    medians: dict[str, float], met: bool | None
) -> None:
    assert judge(Goal("verl", 1 / 8), {name: summarise([value]) for name, value in medians.items()}) is met
    assert Goal("floor", 2.0).words() == "<= 2x floor"


@pytest.mark.parametrize(("seconds", "words"), [(2.5, "2.5 s"), (0.00412, "4.12 ms"), (0.0000421, "42.1 us")])
def test_a_duration_has_a_fitting_unit_that_its_spread_shares(seconds: float, words: str) -> None:
    assert duration(seconds) == words
    assert with_spread(summarise([0.5, 1.0, 1.5])) == "1 s (0.5; 0.75-1.25)"


def test_a_row_has_a_cell_per_heading_with_ratios_dashes_and_missed_goals() -> None:
    found = [Sample(CASE, "phalanx", 0.004), Sample(CASE, "bare Ray", 0.005)]
    row = dict(zip(headings(), cells(rows_of(found, {CASE: (Goal("bare Ray", 0.5),)})[0]), strict=True))

    assert (row["verl"], row["bare Ray / phalanx"]) == ("-", "1.25x")
    assert list(row.values())[-1] == ">= 2x faster than bare Ray: no"


def test_page_has_a_table_for_each_scenario_with_its_measured_contenders() -> None:
    sizes = [Sample(Case("broadcast", 4, megabytes=size), "phalanx", size / 400) for size in (256, 16, 1)]
    bare = Sample(Case("threshold", 4), "bare Ray", 0.1)
    samples = [*sizes, Sample(sizes[0].case, "verl", 6.4), bare, Sample(CASE, "phalanx", 0.004)]

    tables = page_tables(rows_of(samples, {CASE: (Goal("bare Ray", 0.5),)}))

    assert [line for line in tables.splitlines() if "---" not in line] == [
        "| broadcast | phalanx | verl |",
        "| 4 ranks, 1 MB | 2.5 ms | - |",
        "| 4 ranks, 256 MB | 640 ms | 6.4 s, 10x |",
        "",
        "| empty call | phalanx |",
        "| 8 ranks | 4 ms |",
    ]


def test_peak_is_the_highest_sum_above_idle() -> None:
    readings = {1: [100, 110, 105], 2: [10, 40, 10], 3: [10, 20, 50]}
    watch = PeakWatch(1, [2, 3], read=lambda pid: readings[pid].pop(0))
    watch.look()
    watch.look()
    assert (watch.driver, watch.workers) == (10, 40)


def test_only_text_between_the_markers_is_replaced() -> None:
    page = "before\n<!-- bench:begin -->\nold\n<!-- bench:end -->\nafter\n"
    assert replace_between_markers(page, "new") == page.replace("old", "new")
    with pytest.raises(ValueError, match="bench:begin"):
        replace_between_markers("nothing here", "new")


def test_columns_of_unmeasured_contenders_are_left_out_and_bars_are_escaped() -> None:
    heads, rows = measured(["case", "a", "b"], [["x|y", "-", "1 s"], ["z", "-", "-"]])
    assert (heads, rows) == (["case", "b"], [["x|y", "1 s"], ["z", "-"]])
    assert markdown_table(heads, rows).splitlines()[-2:] == ["| x\\|y | 1 s |", "| z | - |"]
