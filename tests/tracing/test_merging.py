"""The merge of the events of driver and ranks on one clock."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.tracing.events import Clock, RankSpan, Span, Trace, TracedCall, Track
from phalanx.tracing.merging import TracedEpoch, estimate_clock, merge
from phalanx.tracing.spans import SpanLog
from tests.tracing.made_up import MS, at, key

HERE = socket.gethostname()


def epoch_on(host: str, group: str = "policy", **more: object) -> TracedEpoch:
    return TracedEpoch(group, 0, tracks=[Track(key(0, group), host)], **more)  # type: ignore[arg-type]


def merged(*epochs: TracedEpoch) -> Trace:
    part = RankSpan(0, encoded=at(1), sent=at(2), fetched=at(20), message_bytes=10)
    call = TracedCall(1, "policy", 0, "", "update", at(0), parts=(part,), number=1001)
    return merge(epochs, [call], SpanLog(), Trace(at(0), at(100)))


def test_times_of_a_rank_on_another_host_are_converted_to_the_drivers_clock() -> None:
    ahead = 5_000 * MS
    part = RankSpan(
        0, received=at(3) + ahead, started=at(4) + ahead, finished=at(17) + ahead, returned=at(18) + ahead
    )
    span = Span("inner", at(5) + ahead, at(6) + ahead, key(0), 1001)
    trace = merged(epoch_on("elsewhere", logs={key(0): SpanLog({1001: part}, [span])}))

    (clock,) = trace.clocks
    assert (clock.host, abs(clock.offset - ahead) <= clock.uncertainty) == ("elsewhere", True)
    part = trace.calls[0].parts[0]
    assert part.received is not None and part.returned is not None
    assert at(1) <= part.received < part.returned <= at(20)
    assert trace.spans[0].call == 1
    assert part.received <= trace.spans[0].began <= part.returned


@pytest.mark.parametrize("epoch", [epoch_on(HERE), epoch_on("elsewhere", shares_clock=True)])
def test_times_of_ranks_with_the_drivers_clock_are_not_corrected(epoch: TracedEpoch) -> None:
    epoch.logs[key(0)] = SpanLog({1001: RankSpan(0, received=at(3), returned=at(18))})
    trace = merged(epoch)

    assert (trace.clocks, trace.calls[0].parts[0].received) == ((), at(3))


@given(
    st.integers(-(10**12), 10**12),
    st.lists(
        st.tuples(st.integers(1, 10**6), st.integers(0, 10**7), st.integers(1, 10**6)), min_size=1, max_size=9
    ),
)
def test_the_true_offset_lies_within_the_uncertainty(offset: int, trips: list[tuple[int, int, int]]) -> None:
    parts = []
    now = 10**15
    for there, work, back in trips:
        received, returned = now + there + offset, now + there + work + offset
        fetched = returned - offset + back
        parts.append(RankSpan(0, encoded=now, received=received, returned=returned, fetched=fetched))
        now += there + work + back
    clock = estimate_clock("b", parts)

    assert clock is not None
    assert abs(clock.offset - offset) <= clock.uncertainty
    assert clock.uncertainty <= max(there for there, _, _ in trips) + max(back for _, _, back in trips)


def test_a_clock_that_was_set_is_uncertain_and_one_sided_bounds_estimate_no_clock() -> None:
    parts = [RankSpan(0, 0, None, 110, None, None, 90, 0), RankSpan(0, 0, None, 1110, None, None, 1090, 0)]

    assert estimate_clock("b", parts) == Clock("b", 600, 491)
    assert estimate_clock("b", [RankSpan(0, encoded=1, received=5)]) is None
    assert estimate_clock("b", [RankSpan(0, returned=8, fetched=9)]) is None
    assert merged(epoch_on("elsewhere")).clocks == ()


def test_earlier_spans_spans_of_other_calls_and_epochs_without_calls_are_left_out() -> None:
    spans = [
        Span("of the call", at(3), at(4), key(0), 1001),
        Span("of another", at(3), at(4), key(0), 7),
        Span("before the trace", at(-3), at(4), key(0), None),
        Span("outside calls", at(5), at(6), key(0), None),
    ]
    called = epoch_on(HERE, logs={key(0): SpanLog({1001: RankSpan(0, received=at(3))}, spans)})
    trace = merged(called, epoch_on(HERE, "idle", notes=["unread"]))

    assert [span.name for span in trace.spans] == ["of the call", "outside calls"]
    assert [track.key.group for track in trace.tracks] == ["policy"]
    assert trace.notes == ()


def test_counts_of_a_rank_that_stays_through_a_resize_are_merged_once() -> None:
    counts = [("engine", at(ms), {"running": float(ms)}) for ms in (1, 5)]
    epochs = []
    for number in (0, 1):
        rank = key(0, epoch=number)
        spans = [Span("span", at(ms), track=rank) for ms in (3, 5)]
        log = SpanLog(spans=spans, counts=counts)
        track = Track(rank, HERE, opened=at(4 * number))
        epochs.append(TracedEpoch("policy", number, tracks=[track], logs={rank: log}))
    trace = merged(*epochs)
    (counter,) = trace.counters

    assert (counter.name, counter.at, counter.values) == ("engine", (at(1), at(5)), {"running": (1.0, 5.0)})
    assert [span.track for span in trace.spans] == [key(0, epoch=0), key(0, epoch=1)]
