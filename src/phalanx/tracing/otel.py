"""Traces as OpenTelemetry spans; needs the extra ``phalanx[otel]``.

A call has a span, with a child span per rank; the user's own spans are sent too. A call whose arguments are results of
other calls by reference has links to their spans. Names of attributes follow OpenTelemetry's semantic conventions:
lower case, with dots; the library's own names begin with "phalanx".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.errors import DeclarationError
from phalanx.tracing.events import RankSpan, Trace, Track, TrackKey

_OF_CALL = ("group", "epoch", "role", "method", "message_bytes", "stored_bytes", "result_bytes")
_OF_PART = ("rank", "argument_bytes", "result_bytes", "items")


def export(trace: Trace, provider: Any = None) -> int:
    """Send every span of a trace to a tracer provider; return their number.

    Args:
        trace: the trace.
        provider: an ``opentelemetry`` tracer provider; by default the global provider.

    Raises:
        DeclarationError: if the package ``opentelemetry`` is not installed.
    """
    try:
        from opentelemetry import trace as api  # optional
    except ImportError as error:
        raise DeclarationError(
            "spans for OpenTelemetry need the package opentelemetry-sdk: pip install 'phalanx[otel]'"
        ) from error
    tracer = (provider or api.get_tracer_provider()).get_tracer("phalanx")

    def send(name: str, start: int, end: int | None, parent: Any, error: str | None, **more: Any) -> Any:
        context = api.set_span_in_context(parent) if parent is not None else None
        span = tracer.start_span(name, context=context, start_time=start, **more)
        if error is not None:
            span.set_status(api.StatusCode.ERROR, error)
        span.end(end_time=max(start, trace.ended if end is None else end))
        return span

    tracks = {track.key: track for track in trace.tracks}
    sent: dict[int, Any] = {}
    parts: dict[tuple[int | None, TrackKey | None], Any] = {}
    for call in trace.calls:  # sources come before the calls that link to them
        links = [api.Link(sent[source].get_span_context()) for source in call.sources if source in sent]
        end = call.ended if call.ended is not None else call.last_seen
        more = {"attributes": _attributes(call, _OF_CALL, {"phalanx.ranks": len(call.parts)}), "links": links}
        name = f"{call.group}.{call.name}"
        sent[call.id] = send(name, call.began, end, None, call.error, kind=api.SpanKind.CLIENT, **more)
        for part in call.parts:
            if part.received is not None:
                key = call.key(part)
                more = {"attributes": _part_attributes(part, tracks.get(key)), "kind": api.SpanKind.SERVER}
                times = part.received, part.returned
                parts[call.id, key] = send(call.name, *times, sent[call.id], part.error, **more)
    for span in trace.spans:
        track = span.track
        of_rank = {} if track is None else {"phalanx.group": track.group, "phalanx.rank": track.rank}
        attributes = _attributes(span, (), span.attributes | of_rank)
        parent = parts.get((span.call, span.track))
        send(span.name, span.began, span.ended, parent, span.error, attributes=attributes)
    return len(sent) + len(parts) + len(trace.spans)


def _attributes(event: object, names: Sequence[str], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of an event that are not None: its fields ``names``, and ``more``."""
    values = {f"phalanx.{name}": getattr(event, name) for name in names} | dict(more)
    return {name: value for name, value in values.items() if value is not None}


def _part_attributes(part: RankSpan, track: Track | None) -> dict[str, Any]:
    more: dict[str, Any] = {"phalanx.unfinished": part.returned is None}
    more |= {f"phalanx.{name}_ns": getattr(part, name) for name in ("received", "started", "finished")}
    if track is not None:
        more |= {"host.name": track.host, "process.pid": track.pid}
        more["phalanx.accelerator"] = ",".join(track.accelerators) or None
    return _attributes(part, _OF_PART, more)
