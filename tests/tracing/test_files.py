"""Files of traces and OpenTelemetry spans: each format has the contents of the trace."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import phalanx as px
from phalanx.tracing import files
from phalanx.tracing.events import CHANNEL, OLDEST, WAITING, RankSpan, Span, Trace, TracedCall
from phalanx.tracing.events import Counter as Counted
from phalanx.tracing.files import DRIVER_PID, chrome_events, entries, load, write
from phalanx.tracing.html import line_chart, resampled, to_html
from tests.tracing.made_up import FAIL, SPAN, TRACE, UPDATE, at, key


def several(elements: st.SearchStrategy[Any]) -> Any:
    return st.lists(elements, max_size=3).map(tuple)


plain = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3) | st.none(), max_size=2)
series = st.dictionaries(st.text(max_size=3), several(st.integers(0, 9)), max_size=2)
#: Other fields get values of their types.
traces = st.builds(
    Trace,
    calls=several(st.builds(TracedCall, parts=several(st.from_type(RankSpan)))),
    spans=several(st.builds(Span, attributes=plain)),
    counters=several(st.builds(Counted, values=series)),
)


@given(traces)
def test_a_trace_is_restored_from_its_file(trace: Trace) -> None:
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(files, "chrome_events", return_value=()):
        assert load(write(trace, Path(folder) / "run.json")) == trace


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = write(TRACE, tmp_path_factory.mktemp("chrome") / "run.json")
    return json.loads(path.read_text())["traceEvents"]


def test_chrome_has_a_process_per_group_a_thread_per_rank_and_times_since_the_start(
    chrome: list[dict[str, Any]],
) -> None:
    processes = {e["pid"]: e["args"]["name"] for e in chrome if e["name"] == "process_name"}
    names = {e["tid"]: e["args"]["name"] for e in chrome if e["name"] == "thread_name"}
    threads = {names[e["tid"]]: processes[e["pid"]] for e in chrome if e["name"] == "thread_name"}
    calls = {e["name"]: names[e["tid"]] for e in chrome if e.get("cat") == "call" and e["pid"] == DRIVER_PID}
    (span,) = [e for e in chrome if e["ph"] == "X" and e["name"] == "backward"]

    assert processes == {1: "driver a (7)", 2: "group policy"}
    assert threads["rank 1 · a GPU 1 · 101"] == "group policy"
    assert threads["policy"] == threads["spans"] == "driver a (7)"
    assert calls == {
        "actor.generate": "policy",
        "actor.update": "policy (2)",
        "fail": "policy",
    }  # no overlaps
    assert (span["ts"], span["dur"], span["args"]) == (22_000.0, 13_000.0, {"rows": 128, "call": 2})


def test_chrome_events_have_the_fields_of_the_trace_event_format(chrome: list[dict[str, Any]]) -> None:
    place = {"ph", "name", "pid", "tid"}
    flow = place | {"ts", "id", "cat"}
    needed = {"M": place | {"args"}, "X": place | {"ts", "dur", "cat"}, "s": flow, "f": flow | {"bp"}}

    assert {event["ph"] for event in chrome} == needed.keys()
    assert all(needed[event["ph"]] <= event.keys() for event in chrome)


def test_chrome_arrows_connect_slices_of_driver_and_ranks_and_of_sources_and_consumers(
    chrome: list[dict[str, Any]],
) -> None:
    starts = {e["id"]: e for e in chrome if e["ph"] == "s"}
    ends = {e["id"]: e for e in chrome if e["ph"] == "f"}
    slices = [e for e in chrome if e["ph"] == "X"]

    assert starts.keys() == ends.keys()
    assert Counter(e["name"] for e in starts.values()) == {"call": 6, "result": 2}
    assert {starts[n]["pid"] for n in starts if starts[n]["name"] == "call"} == {1}
    assert all(ends[n]["pid"] == 2 and starts[n]["ts"] <= ends[n]["ts"] for n in starts)
    for end in (*starts.values(), *ends.values()):
        of_thread = [one for one in slices if one["tid"] == end["tid"]]
        assert any(one["ts"] <= end["ts"] <= one["ts"] + one["dur"] for one in of_thread), end


def test_a_group_may_be_named_spans() -> None:
    calls = [replace(call, group="spans") for call in (FAIL, UPDATE)]
    slices = [e for e in chrome_events(replace(TRACE, calls=tuple(calls))) if e["ph"] == "X"]

    assert {"fail", "actor.update", "load"} <= {e["name"] for e in slices if e["pid"] == DRIVER_PID}


def test_the_report_loads_no_external_resources_and_draws_charts_of_odd_values(tmp_path: Path) -> None:
    odd = {"nan": [float("nan")], "empty": [], "one": [2.0], "flat": [0.0, 0.0], "huge": [1e308, -1e308]}
    odd |= {"inf": [1.0, float("inf"), 2.0], "tiny": [5e-324]}
    text = write(TRACE, tmp_path / "run.html", odd).read_text()

    assert text.count("<polyline") == 8
    assert re.findall(r'text-anchor="\w+">(\d)</text>', line_chart("one", {"": [2.0]}))[-2:] == ["1", "2"]
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)""", text)
    assert not re.findall(r"https?://|@import|url\(|fetch\(", text)


S = 1_000_000_000
FULL = Counted(CHANNEL + "answers", (0, 2 * S, 6 * S), {WAITING: (0.0, 3.0, 1.0), OLDEST: (0.0, 0.5, 2.5)})
COUNTED = Trace(0, 10 * S, counters=(FULL,))


def test_counters_are_chrome_events_and_the_report_has_a_chart_of_each_series() -> None:
    found = [(event["ts"], event["args"][WAITING]) for event in chrome_events(COUNTED) if event["ph"] == "C"]
    page = to_html(COUNTED)

    assert found == [(0.0, 0.0), (2e6, 3.0), (6e6, 1.0)]
    assert resampled(FULL.at, FULL.values[WAITING], 0, 10 * S, 6) == [0.0, 3.0, 3.0, 1.0, 1.0, 1.0]
    assert "channel answers: items that wait, over 10 s" in page
    assert "channel answers: age of the oldest, ms, over 10 s" in page
    assert [m for m in ("0.75", "1", "2", "3") if f'text-anchor="end">{m}<' in page] == ["1", "2", "3"]


def test_equal_counters_of_ranks_share_a_chart_with_room_for_large_numbers() -> None:
    counters = tuple(
        Counted(
            f"engine of rollout rank {rank}", (0, S), {"running": (0.0, 1.0), "tokens": (0.0, 2e6 * rank)}
        )
        for rank in range(2)
    )
    page = to_html(replace(COUNTED, counters=counters))
    label = re.search(r'<text x="(\d+)" [^>]*text-anchor="end">2,000,000<', page)

    assert page.count("engine of rollout: running, over 10 s") == 1
    assert page.count('<div class="chart">') == 2
    assert "<title>rank 0</title>" in page and "<title>rank 1</title>" in page
    assert label is not None and int(label[1]) >= 8 * len("2,000,000")


def test_the_report_escapes_names_from_users(tmp_path: Path) -> None:
    evil, unknown = "</script><script>alert(1)</script>", "\udc80"
    named = replace(
        TRACE,
        title=evil,
        spans=(replace(SPAN, name=evil), replace(SPAN, name=unknown)),
        calls=(replace(FAIL, method=evil, error=evil), UPDATE),
    )
    text = write(named, tmp_path / "run.html", {evil: [1.0]}).read_text()

    assert evil not in text
    assert "\\udc80" in text  # a lone surrogate, which cannot be encoded


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", "{", "not valid JSON"),
        ("a.json", '{"traceEvents": []}', "is not a trace"),
        ("a.json", '{"phalanx": [{"kind": "phalanx-trace", "version": 3}]}', "another version"),
        ("a.json", '{"phalanx": [{"version": 4}]}', "damaged"),
        ("a.html", "", "browsers only"),
    ],
)
def test_files_that_are_no_traces_are_refused_with_the_reason(
    tmp_path: Path, name: str, text: str, says: str
) -> None:
    (tmp_path / name).write_text(text)

    with pytest.raises(px.DeclarationError, match=says):
        load(tmp_path / name)


def test_a_failed_write_keeps_the_previous_file_and_a_running_trace_has_no_file(tmp_path: Path) -> None:
    with px.trace(tmp_path / "run.json"):
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "run.json").write_text("old")
    broken = replace(TRACE, spans=(Span("x", at(1), at(2), key(0), None, {1j: 0}),))  # type: ignore[dict-item]
    with pytest.raises(TypeError):
        write(broken, tmp_path / "run.json")

    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("run.json", "old")]


def test_concurrent_writes_of_one_file_leave_a_complete_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_entries(trace: Trace) -> Iterator[Any]:
        monkeypatch.undo()
        write(trace, tmp_path / "run.json")
        yield from entries(trace)

    monkeypatch.setattr(files, "entries", slow_entries)
    write(TRACE, tmp_path / "run.json")

    assert load(tmp_path / "run.json") == TRACE


def test_opentelemetry_spans_nest_calls_ranks_and_spans_with_times_and_errors() -> None:
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracer = px.trace()
    tracer._trace = TRACE
    assert tracer.to_opentelemetry(provider) == 11  # 3 calls on 2 ranks each, 2 spans of the user
    found = {(one.name, one.attributes.get("phalanx.rank")): one for one in memory.get_finished_spans()}
    call, update = found["policy.actor.generate", None], found["policy.actor.update", None]
    share, inner = found["actor.generate", 1], found["backward", 0]
    failed, last = found["fail", 0], found["fail", 1]

    assert (call.start_time, call.end_time) == (at(0), at(32))
    assert call.attributes["phalanx.stored_bytes"] == 500
    assert share.parent.span_id == call.context.span_id
    assert (share.attributes["host.name"], share.attributes["process.pid"]) == ("a", 101)
    assert (share.start_time, share.end_time) == (at(4), at(28))
    assert inner.parent.span_id == found["actor.update", 0].context.span_id
    assert inner.attributes["rows"] == 128
    assert [link.context.span_id for link in update.links] == [call.context.span_id]
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, "ValueError: no")
    assert (last.attributes["phalanx.unfinished"], last.end_time) == (True, TRACE.ended)
