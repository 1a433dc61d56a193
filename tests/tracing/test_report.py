"""What a trace says: tables computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.display.tables import Table
from phalanx.tracing.durations import clipped, union
from phalanx.tracing.events import STARTING, Call, Clock, Trace
from phalanx.tracing.html import to_html
from phalanx.tracing.report import report
from tests.tracing.made_up import MS, TRACE, UPDATE, at, key, part, track


def row(table: Table, **where: Any) -> dict[str, Any]:
    return next(
        one for one in table.to_dict()["rows"] if all(one[name] == value for name, value in where.items())
    )


def test_time_of_a_call_goes_from_plan_to_value() -> None:
    found = row(report(TRACE).methods, call="policy.actor.generate")

    assert (found["calls"], found["failed"], found["total ms"], found["on a rank ms"]) == (1, 0, 32, 15)


def test_a_failed_call_is_counted_as_one() -> None:
    assert row(report(TRACE).methods, call="policy.fail")["failed"] == 1


def test_skew_names_the_rank_that_is_last() -> None:
    found = row(report(TRACE).skew, call="policy.actor.generate")

    assert (found["median ms"], found["last"], found["in % of calls"]) == (10, "rank 1", 100)
    assert found["slowest / mean"] == pytest.approx(20 / 15, rel=1e-3)


def test_the_slowest_rank_comes_first() -> None:
    found = report(TRACE).ranks.to_dict()["rows"]

    assert [(one["rank"], one["methods ms"], one["times last"]) for one in found] == [(1, 45, 2), (0, 38, 0)]


def test_idle_is_the_share_of_an_accelerators_time_without_a_call() -> None:
    found = row(report(TRACE).accelerators, accelerator="a GPU 0")

    assert found["idle %"] == 53  # at work 3-16, 17-42 and 71-80 of 100 ms


def test_groups_that_share_an_accelerator_share_its_idle_time() -> None:
    other = Call(9, "judge", 0, "", "score", at(50), parts=(part(0, 50, 50, 50, 50, 60, 60, 61),))
    shared = replace(track(0, accelerator="0"), key=key(0, "judge"))
    both = replace(TRACE, calls=(*TRACE.calls, other), tracks=(*TRACE.tracks, shared))

    assert row(report(both).accelerators, accelerator="a GPU 0")["idle %"] == 43


def test_a_rank_without_an_accelerator_does_not_count_beside_those_with_one() -> None:
    judge = replace(track(0, accelerator=""), key=key(0, "judge"), accelerators=())
    both = replace(TRACE, tracks=(*TRACE.tracks, judge))

    assert len(report(both).accelerators.rows) == len(report(TRACE).accelerators.rows)
    assert len(report(replace(TRACE, tracks=(judge,))).accelerators.rows) == 1


def test_the_page_has_a_mean_of_accelerators_only() -> None:
    bare = tuple(replace(one, accelerators=()) for one in TRACE.tracks)

    assert "idle, mean of accelerators" in "".join(to_html(TRACE))
    assert "idle, mean" not in "".join(to_html(replace(TRACE, tracks=bare)))


def test_the_start_of_a_group_is_neither_work_nor_idleness() -> None:
    start = Call(9, "policy", 0, "", STARTING, at(0), parts=(part(0, 0, 0, 0, 1, 50, 50, 50),))
    alone = replace(TRACE, calls=(start,), tracks=(track(0, accelerator="0"),))

    assert report(alone).accelerators.to_dict()["rows"] == [
        {
            "accelerator": "a GPU 0",
            "ranks on it": ["policy rank 0"],
            "held s": 0.05,
            "at work s": 0,
            "idle %": 100,
        }
    ]


def test_waiting_behind_another_call_is_told_apart_from_the_way() -> None:
    found = row(report(TRACE).phases, call="policy.actor.update")

    # rank 0 was busy until 16 and took it up at 17; rank 1 until 28 and at 29
    assert found["queued"] == pytest.approx(((16 - 3.8) + (28 - 3.9)) / 2, rel=1e-3)
    assert found["on the way"] == pytest.approx(1)


def test_waiting_for_a_result_by_reference_is_neither_work_nor_getting_arguments() -> None:
    source = Call(1, "policy", 0, "", "make", at(0), parts=(part(0, 0, 0, 0, 0, 50, 50),))
    user = Call(2, "judge", 0, "", "use", at(0), sources=(1,), parts=(part(0, 0, 0, 10, 60, 80, 80),))
    judge = replace(track(0, accelerator="1"), key=key(0, "judge"))
    made = report(Trace(at(0), at(100), calls=(source, user), tracks=(track(0, accelerator="0"), judge)))

    assert row(made.accelerators, accelerator="a GPU 1")["idle %"] == 70  # at work 50-80
    assert row(made.ranks, group="judge")["arguments ms"] == 10
    assert row(made.phases, call="judge.use")["awaiting"] == 40


def test_bytes_are_added_up_by_method() -> None:
    found = row(report(TRACE).traffic, call="policy.actor.generate")

    assert found == {
        "call": "policy.actor.generate",
        "calls": 1,
        "message bytes": 200,
        "stored bytes": 500,
        "decoded bytes": 100,
        "returned bytes": 100,
    }


def test_failures_name_the_rank() -> None:
    assert report(TRACE).failures.to_dict()["rows"] == [
        {"at s": 0.07, "call": "policy.fail", "rank": "rank 0", "error": "ValueError: no"}
    ]


def test_an_error_of_the_driver_alone_is_a_failure_too() -> None:
    late = replace(UPDATE, error="CallTimeout: 1 s")

    assert [one["error"] for one in report(replace(TRACE, calls=(late,))).failures.to_dict()["rows"]] == [
        "CallTimeout: 1 s"
    ]


def test_notes_say_how_sure_the_clocks_are() -> None:
    notes = report(replace(TRACE, clocks=(Clock("b", 3 * MS, MS // 2),))).notes

    assert notes[0] == "a note"
    assert "+3.000 ms" in notes[1]
    assert "0.500 ms" in notes[1]


def test_a_report_of_nothing_has_no_tables() -> None:
    assert report(Trace(0, 1)).tables == ()


def test_a_report_is_text_and_data() -> None:
    made = report(TRACE)

    assert "policy.actor.generate" in str(made)
    assert made.to_dict()["skew"][0]["call"] == "policy.actor.generate"


stretches = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda pair: (min(pair), max(pair)))
)


@given(stretches)
def test_the_union_counts_each_moment_once(times: list[tuple[int, int]]) -> None:
    assert union(times) == len({moment for start, end in times for moment in range(start, end)})


@given(stretches, stretches)
def test_what_is_clipped_lies_in_a_window(
    times: list[tuple[int, int]], windows: list[tuple[int, int]]
) -> None:
    inside = {m for a, b in times for m in range(a, b)} & {m for a, b in windows for m in range(a, b)}

    assert union(clipped(times, windows)) == len(inside)
