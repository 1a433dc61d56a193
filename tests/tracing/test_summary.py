"""The summary of a trace, computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phalanx.tracing.events import STARTING, Trace, TracedCall
from phalanx.tracing.html import to_html
from phalanx.tracing.summary import idle_shares, summarize
from tests.tracing.made_up import TRACE, UPDATE, at, key, part, track


def row(trace: Trace, call: str) -> dict[str, Any]:
    return next(found for found in summarize(trace).to_dict()["methods"] if found["call"] == call)


def test_a_row_has_times_bytes_in_both_directions_and_idle_shares() -> None:
    assert row(TRACE, "policy.actor.generate") == {
        "call": "policy.actor.generate",
        "calls": 1,
        "failed": 0,
        "p50 ms": 32,
        "p95 ms": 32,
        "bytes to ranks": 700,
        "bytes from ranks": 100,
        "idle % by rank": ["53", "20"],
    }


def test_percentiles_are_times_of_actual_calls_and_an_unfinished_call_has_no_times() -> None:
    calls = [TracedCall(i, "g", 0, "", "step", at(0), ended=at(i + 1)) for i in range(100)]
    trace = Trace(at(0), at(200), calls=(*calls, TracedCall(100, "g", 0, "", "open", at(0))))
    found = row(trace, "g.step")

    assert (found["calls"], found["p50 ms"], found["p95 ms"]) == (100, 50, 95)
    assert row(trace, "g.open")["p50 ms"] is None


def test_a_rank_that_waits_for_a_result_by_reference_is_idle() -> None:
    source = TracedCall(1, "policy", 0, "", "make", at(0), parts=(part(0, 0, 0, 50, 50),))
    user = TracedCall(2, "judge", 0, "", "use", at(0), sources=(1,), parts=(part(0, 10, 60, 80, 80),))
    judge = replace(track(0, accelerator="1"), key=key(0, "judge"))
    trace = Trace(at(0), at(100), calls=(source, user), tracks=(track(0, accelerator="0"), judge))

    assert idle_shares(trace)[key(0, "judge")] == 70  # busy from 50 to 80 ms


def test_overlapping_calls_count_once_and_the_start_of_a_group_is_not_counted() -> None:
    calls = tuple(
        TracedCall(n, "policy", 0, "", "ask", at(0), parts=(part(0, start, start, end, end),))
        for n, (start, end) in enumerate([(0, 40), (10, 20), (30, 60), (150, 160)])
    )
    start = TracedCall(9, "policy", 0, "", STARTING, at(0), parts=(part(0, 0, 1, 50, 50, 50),))
    work = TracedCall(10, "policy", 0, "", "step", at(50), parts=(part(0, 50, 50, 75, 75, 75),))

    assert idle_shares(Trace(at(0), at(100), calls=calls, tracks=(track(0),))) == {key(0): 40}
    assert idle_shares(Trace(at(0), at(100), calls=(start, work), tracks=(track(0),))) == {key(0): 50}


def test_notes_name_the_first_failures_and_count_the_others() -> None:
    of_driver = replace(TRACE, calls=(replace(UPDATE, error="CallTimeout: 1 s"),))
    errors = ["CallCancelled: its reader left it", *["KeyError: 1"] * 10]
    many = replace(TRACE, calls=tuple(replace(UPDATE, error=error) for error in errors))

    assert row(TRACE, "policy.fail")["failed"] == 1
    assert [summarize(trace).notes[-1] for trace in (TRACE, of_driver, many)] == [
        "At 0.07 s, policy.fail failed on rank 0: ValueError: no",
        "At 0.0035 s, policy.actor.update failed: CallTimeout: 1 s",
        "2 more failures are in the trace.",
    ]


def test_a_summary_begins_with_the_size_of_the_trace_and_has_its_notes() -> None:
    summary = summarize(TRACE)

    assert summarize(Trace(0, 1)).rows == ()
    assert str(summary).startswith("made up: 0.1 s, 3 calls of 1 groups on 2 ranks\n")
    assert summary.notes[0] == "a note"


def test_the_report_has_figures_of_the_newest_epoch_of_a_group() -> None:
    page = to_html(TRACE)

    assert "<b>36 %</b><span>idle, mean of ranks</span>" in page
    assert "policy.actor.generate" in page

    newer = tuple(replace(track(0), key=key(0, epoch=number)) for number in (1, 2))
    trace = replace(TRACE, tracks=(*TRACE.tracks, *newer))

    assert list(idle_shares(trace)) == [key(0, epoch=2)]
    assert row(trace, "policy.fail")["idle % by rank"] == ["100"]
    assert "on 1 ranks" in summarize(trace).title
    assert "<b>1</b><span>ranks</span>" in to_html(trace)
