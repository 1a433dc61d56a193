"""The merge of the events of driver and ranks."""

from __future__ import annotations

from phalanx.tracing.events import Counter, RankSpan, Span, Trace, TracedCall, Track
from phalanx.tracing.merging import MOST_POINTS, TracedEpoch, merge
from phalanx.tracing.spans import SpanLog
from tests.tracing.made_up import at, key


def epoch_of(group: str = "policy", **more: object) -> TracedEpoch:
    return TracedEpoch(group, 0, tracks=[Track(key(0, group))], **more)  # type: ignore[arg-type]


def merged(*epochs: TracedEpoch) -> Trace:
    part = RankSpan(0, fetched=at(20))
    call = TracedCall(1, "policy", 0, "", "update", at(0), parts=(part,), number=1001)
    return merge(epochs, [call], SpanLog(), Trace(at(0), at(100)))


def test_times_of_a_rank_are_shown_as_its_host_recorded_them_but_not_before_the_call() -> None:
    part = RankSpan(0, received=at(-1), started=at(-0.5), finished=at(17), returned=at(18))
    trace = merged(epoch_of(logs={key(0): SpanLog({1001: part})}))
    (seen,) = trace.calls[0].parts

    assert (seen.received, seen.started, seen.finished, seen.returned) == (at(0), at(0), at(17), at(18))


def test_earlier_spans_spans_of_other_calls_and_epochs_without_calls_are_left_out() -> None:
    spans = [
        Span("of the call", at(3), at(4), key(0), 1001),
        Span("of another", at(3), at(4), key(0), 7),
        Span("before the trace", at(-3), at(4), key(0), None),
        Span("outside calls", at(5), at(6), key(0), None),
    ]
    called = epoch_of(logs={key(0): SpanLog({1001: RankSpan(0, received=at(3))}, spans)})
    trace = merged(called, epoch_of("idle", notes=["unread"]))

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
        track = Track(rank, opened=at(4 * number))
        epochs.append(TracedEpoch("policy", number, tracks=[track], logs={rank: log}))
    trace = merged(*epochs)
    (counter,) = trace.counters

    assert (counter.name, counter.at, counter.values) == ("engine", (at(1), at(5)), {"running": (1.0, 5.0)})
    assert [span.track for span in trace.spans] == [key(0, epoch=0), key(0, epoch=1)]


def counted(waiting: dict[int, float], began: int, ended: int) -> tuple[Counter, ...]:
    """Return the counters of a trace in which ``waiting`` maps times to numbers of items."""
    log = SpanLog(counts=[("c", at, {"waiting": value}) for at, value in waiting.items()])
    return merge([], [], log, Trace(began, ended)).counters


def test_a_counter_begins_with_its_value_before_the_trace_and_is_limited_in_points() -> None:
    waiting = {1: 5.0, 4: 2.0, 9: 1.0}

    assert counted(waiting, 2, 8) == (Counter("c", (2, 4), {"waiting": (5.0, 2.0)}),)
    assert counted(waiting, 0, 0) == ()

    (counter,) = counted({at: float(at) for at in range(10 * MOST_POINTS + 1)}, 0, 10 * MOST_POINTS)

    assert MOST_POINTS // 2 <= len(counter.at) <= MOST_POINTS + 1
    assert counter.at[0] == 0 and counter.values["waiting"][-1] == 10 * MOST_POINTS
