"""What a report says of weights that went from role to role."""

from __future__ import annotations

from phalanx.tracing.events import Span, Trace, TrackKey
from phalanx.tracing.report import report
from phalanx.tracing.weight_report import span_attributes


def trace_of(*spans: Span) -> Trace:
    return Trace(began=0, ended=10**9, spans=spans)


def received(target: int, nbytes: dict[int, int], ended: int | None) -> Span:
    attributes = span_attributes(3, "segments", nbytes)
    return Span("weights 'policy'", 0, ended, TrackKey("rollout", 0, target), attributes=attributes)


def test_each_pair_of_ranks_has_a_row_with_bytes_time_and_rate() -> None:
    table = report(trace_of(received(1, {0: 1 << 20, 2: 3 << 20}, 10**8))).weights

    assert table.rows == (
        ("policy", 3, 0, "rollout rank 1", "segments", "1.0 MiB", 100.0, "10.0 MiB/s"),
        ("policy", 3, 2, "rollout rank 1", "segments", "3.0 MiB", 100.0, "30.0 MiB/s"),
    )


def test_a_sync_that_did_not_end_has_no_time() -> None:
    assert report(trace_of(received(0, {0: 8}, None))).weights.rows[0][-2:] == (None, None)


def test_spans_of_users_are_no_weights() -> None:
    assert not report(trace_of(Span("load batch", 0, 5))).weights.rows
