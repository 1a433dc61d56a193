"""Traces as OpenTelemetry spans."""

from __future__ import annotations

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from phalanx.tracing.otel import export
from tests.tracing.made_up import TRACE, at


def test_calls_shares_of_ranks_and_spans_lie_in_one_another_with_their_times_and_errors() -> None:
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    assert export(TRACE, provider) == 11  # 3 calls on 2 ranks each, 2 spans of the user
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
