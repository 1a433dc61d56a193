"""Counters of a trace, and their presentation in files and reports."""

from __future__ import annotations

import re
from dataclasses import replace

import phalanx as px
from phalanx.tracing.events import CHANNEL, OLDEST, WAITING, Counter, Trace
from phalanx.tracing.files import chrome_events
from phalanx.tracing.html import resampled, to_html
from phalanx.tracing.merging import MOST_POINTS, merge
from phalanx.tracing.spans import SpanLog

S = 1_000_000_000
FULL = Counter(CHANNEL + "answers", (0, 2 * S, 6 * S), {WAITING: (0.0, 3.0, 1.0), OLDEST: (0.0, 0.5, 2.5)})
TRACE = Trace(0, 10 * S, counters=(FULL,))


def counted(waiting: dict[int, float], began: int, ended: int) -> tuple[Counter, ...]:
    """Return the counters of a trace in which ``waiting`` maps times to numbers of items."""
    log = SpanLog(counts=[("c", at, {WAITING: value}) for at, value in waiting.items()])
    return merge([], [], log, Trace(began, ended)).counters


def test_a_counter_begins_with_its_value_before_the_trace_and_is_limited_in_points() -> None:
    waiting = {1: 5.0, 4: 2.0, 9: 1.0}

    assert counted(waiting, 2, 8) == (Counter("c", (2, 4), {WAITING: (5.0, 2.0)}),)
    assert counted(waiting, 0, 0) == ()

    (counter,) = counted({at: float(at) for at in range(10 * MOST_POINTS + 1)}, 0, 10 * MOST_POINTS)

    assert MOST_POINTS // 2 <= len(counter.at) <= MOST_POINTS + 1
    assert counter.at[0] == 0 and counter.values[WAITING][-1] == 10 * MOST_POINTS


def test_counters_are_chrome_events_and_the_report_has_a_chart_of_each_series() -> None:
    found = [(event["ts"], event["args"][WAITING]) for event in chrome_events(TRACE) if event["ph"] == "C"]
    page = to_html(TRACE)

    assert found == [(0.0, 0.0), (2e6, 3.0), (6e6, 1.0)]
    assert resampled(FULL.at, FULL.values[WAITING], 0, 10 * S, 6) == [0.0, 3.0, 3.0, 1.0, 1.0, 1.0]
    assert "channel answers: items that wait, over 10 s" in page
    assert "channel answers: age of the oldest, ms, over 10 s" in page
    assert [m for m in ("0.75", "1", "2", "3") if f'text-anchor="end">{m}<' in page] == ["1", "2", "3"]


def test_equal_counters_of_ranks_share_a_chart_with_room_for_large_numbers() -> None:
    counters = tuple(
        Counter(
            f"engine of rollout rank {rank}", (0, S), {"running": (0.0, 1.0), "tokens": (0.0, 2e6 * rank)}
        )
        for rank in range(2)
    )
    page = to_html(replace(TRACE, counters=counters))
    label = re.search(r'<text x="(\d+)" [^>]*text-anchor="end">2,000,000<', page)

    assert page.count("engine of rollout: running, over 10 s") == 1
    assert page.count('<div class="chart">') == 2
    assert "<title>rank 0</title>" in page and "<title>rank 1</title>" in page
    assert label is not None and int(label[1]) >= 8 * len("2,000,000")


def test_a_trace_counts_the_items_of_channels_that_are_used() -> None:
    with px.Channel(name="traced", backend="inline") as channel:
        channel.put(0)
        with px.trace() as trace, px.Channel(name="later", backend="inline") as later:
            assert trace.events.counters == ()
            channel.put(1)
            channel.put(2)
            channel.get()
            (counter,) = trace.events.counters
            later.put(0)
            assert len(trace.events.counters) == 2

    # the last value follows the acknowledgement
    assert (counter.name, counter.values[WAITING]) == ("channel traced", (2, 3, 2, 2))
