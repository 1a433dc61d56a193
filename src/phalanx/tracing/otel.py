"""Traces as OpenTelemetry spans; needs the extra ``phalanx[otel]``.

A span per call, below it a span per rank, and the user's own spans. A call whose arguments are results of others by
reference has links to them. Names of attributes follow OpenTelemetry's semantic conventions: lower case, with dots;
the library's own begin with "phalanx".
"""

from __future__ import annotations

from typing import Any

from phalanx.errors import DeclarationError
from phalanx.tracing.events import Call, Part, Trace, Track, TrackKey


def export(trace: Trace, provider: Any = None) -> int:
    """Send every span of a trace to a tracer provider; return their number.

    Args:
        trace: the trace.
        provider: an ``opentelemetry`` tracer provider; default the global one.

    Raises:
        DeclarationError: if the package ``opentelemetry`` is not installed.
    """
    try:
        from opentelemetry import trace as api  # an extra
    except ImportError as error:
        raise DeclarationError(
            "spans for OpenTelemetry need the package opentelemetry-sdk: pip install 'phalanx[otel]'"
        ) from error
    tracer = (provider or api.get_tracer_provider()).get_tracer("phalanx")
    count = 0

    def send(name: str, start: int, end: int | None, parent: Any, error: str | None, **more: Any) -> Any:
        nonlocal count
        context = api.set_span_in_context(parent) if parent is not None else None
        span = tracer.start_span(name, context=context, start_time=start, **more)
        if error is not None:
            span.set_status(api.StatusCode.ERROR, error)
        span.end(end_time=max(start, trace.ended if end is None else end))
        count += 1
        return span

    tracks = {track.key: track for track in trace.tracks}
    sent: dict[int, Any] = {}
    parts: dict[tuple[int | None, TrackKey | None], Any] = {}
    for call in trace.calls:  # sources come before the calls that link to them
        sources = [sent[source] for source in call.sources if source in sent]
        links = [api.Link(source.get_span_context()) for source in sources]
        end = call.ended if call.ended is not None else call.last_seen
        more = {"attributes": _call_attributes(call), "links": links, "kind": api.SpanKind.CLIENT}
        sent[call.id] = send(f"{call.group}.{call.name}", call.began, end, None, call.error, **more)
        for part in call.parts:
            if part.received is not None:
                more = {
                    "attributes": _part_attributes(part, tracks.get(call.key(part))),
                    "kind": api.SpanKind.SERVER,
                }
                span = send(call.name, part.received, part.returned, sent[call.id], part.error, **more)
                parts[call.id, call.key(part)] = span
    for span in trace.spans:
        attributes = {key: value for key, value in span.attributes.items() if value is not None}
        if span.track is not None:
            attributes |= {"phalanx.group": span.track.group, "phalanx.rank": span.track.rank}
        parent = parts.get((span.call, span.track))
        send(span.name, span.began, span.ended, parent, span.error, attributes=attributes)
    return count


def _call_attributes(call: Call) -> dict[str, Any]:
    return {
        "phalanx.group": call.group,
        "phalanx.epoch": call.epoch,
        "phalanx.role": call.role,
        "phalanx.method": call.method,
        "phalanx.ranks": len(call.parts),
        "phalanx.message_bytes": call.message_bytes,
        "phalanx.stored_bytes": call.stored_bytes,
        "phalanx.result_bytes": call.result_bytes,
    }


def _part_attributes(part: Part, track: Track | None) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "phalanx.rank": part.rank,
        "phalanx.argument_bytes": part.argument_bytes,
        "phalanx.result_bytes": part.result_bytes,
        "phalanx.items": part.items,
        "phalanx.unfinished": part.returned is None,
        "phalanx.received_ns": part.received,
        "phalanx.started_ns": part.started,
        "phalanx.finished_ns": part.finished,
    }
    if track is not None:
        attributes |= {"host.name": track.host, "process.pid": track.pid}
        attributes["phalanx.accelerator"] = ",".join(track.accelerators) or None
    return {name: value for name, value in attributes.items() if value is not None}
