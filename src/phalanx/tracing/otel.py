"""Traces as OpenTelemetry spans; needs the extra ``phalanx[otel]``.

A span per call, under it one per rank with what the rank did, and the user's own spans. A call whose arguments are
results of others by reference has links to them. Names of attributes follow the rules of OpenTelemetry's semantic
conventions: lower case, with dots; the library's own begin with "phalanx".
"""

from __future__ import annotations

from typing import Any

from phalanx.errors import DeclarationError
from phalanx.tracing.events import Call, Part, Span, Trace, TrackKey


def export(trace: Trace, provider: Any = None) -> int:
    """Give every span of a trace to a tracer provider; how many they were.

    Args:
        trace: what was recorded.
        provider: an ``opentelemetry`` tracer provider; default the global one.

    Raises:
        DeclarationError: the package ``opentelemetry`` is not installed.
    """
    try:
        from opentelemetry import trace as api  # an extra
    except ImportError as error:
        raise DeclarationError(
            "spans for OpenTelemetry need the package opentelemetry-sdk: pip install 'phalanx[otel]'"
        ) from error
    tracer = (provider or api.get_tracer_provider()).get_tracer("phalanx")
    return _Exporter(api, tracer, trace).run()


class _Exporter:
    """The spans of one trace: sources first, so that links have something to point at."""

    def __init__(self, api: Any, tracer: Any, trace: Trace) -> None:
        self._api = api
        self._tracer = tracer
        self._trace = trace
        self._of_call: dict[int, Any] = {}
        self._of_part: dict[tuple[int, TrackKey], Any] = {}
        self._hosts = {track.key: track for track in trace.tracks}
        self._count = 0

    def run(self) -> int:
        for call in self._trace.calls:
            self._call(call)
        for span in self._trace.spans:
            self._span(span)
        return self._count

    def _make(self, name: str, start: int, end: int, parent: Any, error: str | None, **more: Any) -> Any:
        context = self._api.set_span_in_context(parent) if parent is not None else None
        made = self._tracer.start_span(name, context=context, start_time=start, **more)
        if error is not None:
            made.set_status(self._api.StatusCode.ERROR, error)
        made.end(end_time=max(start, end))
        self._count += 1
        return made

    def _call(self, call: Call) -> None:
        sources = [self._of_call[source] for source in call.sources if source in self._of_call]
        attributes = {
            "phalanx.group": call.group,
            "phalanx.epoch": call.epoch,
            "phalanx.role": call.role,
            "phalanx.method": call.method,
            "phalanx.ranks": len(call.parts),
            "phalanx.message_bytes": sum(part.message_bytes for part in call.parts),
            "phalanx.stored_bytes": call.stored_bytes,
            "phalanx.result_bytes": sum(part.result_bytes for part in call.parts),
        }
        end = call.ended if call.ended is not None else call.last_seen
        made = self._make(
            f"{call.group}.{call.name}",
            call.began,
            end,
            None,
            call.error,
            attributes=attributes,
            links=[self._api.Link(source.get_span_context()) for source in sources],
            kind=self._api.SpanKind.CLIENT,
        )
        self._of_call[call.id] = made
        for part in call.parts:
            self._part(call, part, made)

    def _part(self, call: Call, part: Part, parent: Any) -> None:
        if part.received is None:
            return
        key = call.key(part)
        track = self._hosts.get(key)
        times = {"received": part.received, "started": part.started, "finished": part.finished}
        attributes: dict[str, Any] = {
            "phalanx.rank": part.rank,
            "phalanx.argument_bytes": part.argument_bytes,
            "phalanx.result_bytes": part.result_bytes,
            **({} if part.items is None else {"phalanx.items": part.items}),
            "phalanx.unfinished": part.returned is None,
            **{f"phalanx.{name}_ns": time for name, time in times.items() if time is not None},
        }
        if track is not None:
            attributes |= {"host.name": track.host, "process.pid": track.pid}
            if track.accelerators:
                attributes["phalanx.accelerator"] = ",".join(track.accelerators)
        end = part.returned if part.returned is not None else self._trace.ended
        self._of_part[call.id, key] = self._make(
            call.name,
            part.received,
            end,
            parent,
            part.error,
            attributes=attributes,
            kind=self._api.SpanKind.SERVER,
        )

    def _span(self, span: Span) -> None:
        parent = None
        if span.track is not None and span.call is not None:
            parent = self._of_part.get((span.call, span.track))
        attributes = {key: value for key, value in span.attributes.items() if value is not None}
        if span.track is not None:
            attributes |= {"phalanx.group": span.track.group, "phalanx.rank": span.track.rank}
        end = span.ended if span.ended is not None else self._trace.ended
        self._make(span.name, span.began, end, parent, span.error, attributes=attributes)
