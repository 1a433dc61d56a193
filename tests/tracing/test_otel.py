"""Traces as OpenTelemetry spans."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from phalanx.tracing.otel import export
from tests.tracing.made_up import TRACE, at


@pytest.fixture(scope="module")
def spans() -> list[Any]:
    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    assert export(TRACE, provider) == 11  # 3 calls on 2 ranks each, 2 spans of the user
    return list(memory.get_finished_spans())


def found(spans: list[Any], name: str, rank: int | None = None) -> Any:
    return next(one for one in spans if one.name == name and one.attributes.get("phalanx.rank") == rank)


def test_a_call_has_the_times_that_were_recorded(spans: list[Any]) -> None:
    one = found(spans, "policy.actor.generate")

    assert (one.start_time, one.end_time) == (at(0), at(32))
    assert one.attributes["phalanx.stored_bytes"] == 500


def test_a_ranks_share_lies_under_its_call_and_says_where_it_ran(spans: list[Any]) -> None:
    one = found(spans, "actor.generate", 1)

    assert one.parent.span_id == found(spans, "policy.actor.generate").context.span_id
    assert (one.attributes["host.name"], one.attributes["process.pid"]) == ("a", 101)
    assert (one.start_time, one.end_time) == (at(4), at(28))


def test_a_span_of_a_worker_lies_under_its_ranks_share(spans: list[Any]) -> None:
    one = found(spans, "backward", 0)

    assert one.parent.span_id == found(spans, "actor.update", 0).context.span_id
    assert one.attributes["rows"] == 128


def test_a_call_is_linked_to_the_call_whose_result_it_got(spans: list[Any]) -> None:
    links = found(spans, "policy.actor.update").links

    assert [link.context.span_id for link in links] == [found(spans, "policy.actor.generate").context.span_id]


def test_errors_are_the_status_of_their_spans(spans: list[Any]) -> None:
    status = found(spans, "fail", 0).status

    assert (status.status_code, status.description) == (StatusCode.ERROR, "ValueError: no")


def test_a_share_that_nobody_saw_the_end_of_says_so(spans: list[Any]) -> None:
    one = found(spans, "fail", 1)

    assert (one.attributes["phalanx.unfinished"], one.end_time) == (True, TRACE.ended)
