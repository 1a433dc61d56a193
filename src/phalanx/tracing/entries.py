"""Traces as plain data, for JSON: what every file format of ours that can be read back carries.

Times are written relative to what they belong to, so that files of long runs stay small: those of calls and spans to
the start of the trace, those of parts to the start of their call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from phalanx.errors import DeclarationError
from phalanx.tracing.events import Call, Clock, Counter, Part, Span, Trace, Track, TrackKey

FORMAT = "phalanx-trace"
VERSION = 1

_PART_TIMES = ("encoded", "sent", "received", "started", "finished", "returned", "fetched")
_PART_SIZES = ("message_bytes", "argument_bytes", "result_bytes")
_CALL_TIMES = ("planned", "asked", "joined", "ended")


def entries(trace: Trace) -> Iterator[dict[str, Any]]:
    """The trace as one entry after another: what it is, then its tracks, calls, spans and counters."""
    yield {
        "kind": FORMAT,
        "version": VERSION,
        "began": trace.began,
        "ended": trace.ended,
        "host": trace.host,
        "pid": trace.pid,
        "title": trace.title,
        "clocks": [asdict(clock) for clock in trace.clocks],
        "notes": list(trace.notes),
    }
    for track in trace.tracks:
        yield {"kind": "track", **asdict(track), "key": list(track.key)}
    for call in trace.calls:
        yield _of_call(call, trace.began)
    for span in trace.spans:
        yield _of_span(span, trace.began)
    for counter in trace.counters:
        at = [time - trace.began for time in counter.at]
        yield {"kind": "counter", "name": counter.name, "at": at, "values": counter.values}


def _of_call(call: Call, zero: int) -> dict[str, Any]:
    made: dict[str, Any] = {
        "kind": "call",
        "id": call.id,
        "group": call.group,
        "epoch": call.epoch,
        "role": call.role,
        "method": call.method,
        "began": call.began - zero,
        "stored_bytes": call.stored_bytes,
        "error": call.error,
        "sources": list(call.sources),
    }
    made |= {name: _less(getattr(call, name), call.began) for name in _CALL_TIMES}
    made["parts"] = [_of_part(part, call.began) for part in call.parts]
    return made


def _of_part(part: Part, zero: int) -> list[Any]:
    times = [_less(getattr(part, name), zero) for name in _PART_TIMES]
    made = [part.rank, *times, *(getattr(part, name) for name in _PART_SIZES)]
    if part.items is not None:
        return [*made, part.error, part.items]
    return made if part.error is None else [*made, part.error]


def _of_span(span: Span, zero: int) -> dict[str, Any]:
    return {
        "kind": "span",
        "name": span.name,
        "began": span.began - zero,
        "ended": _less(span.ended, zero),
        "track": None if span.track is None else list(span.track),
        "call": span.call,
        "attributes": span.attributes,
        "error": span.error,
    }


def from_entries(entries: Iterable[dict[str, Any]], where: str) -> Trace:
    """The trace that :func:`entries` gave; entries of kinds that are not known are left out.

    Raises:
        DeclarationError: they are not those of a trace; ``where`` says in the message what was read.
    """
    try:
        return _trace(entries, where)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DeclarationError(
            f"{where} is not a trace of phalanx, or it is damaged: {type(error).__name__}: {error}"
        ) from error


def _trace(entries: Iterable[dict[str, Any]], where: str) -> Trace:
    head: dict[str, Any] | None = None
    tracks: list[Track] = []
    calls: list[Call] = []
    spans: list[Span] = []
    counters: list[Counter] = []
    for entry in entries:
        kind = entry["kind"]
        if head is None:
            head = _checked(entry, where)
        elif kind == "track":
            tracks.append(_track(entry))
        elif kind == "call":
            calls.append(_call(entry, head["began"]))
        elif kind == "span":
            spans.append(_span(entry, head["began"]))
        elif kind == "counter":
            counters.append(_counter(entry, head["began"]))
    if head is None:
        raise DeclarationError(f"{where} holds no trace; expected one that px.trace(...) wrote")
    return Trace(
        began=head["began"],
        ended=head["ended"],
        host=head["host"],
        pid=head["pid"],
        title=head["title"],
        tracks=tuple(tracks),
        calls=tuple(calls),
        spans=tuple(spans),
        counters=tuple(counters),
        clocks=tuple(Clock(**clock) for clock in head["clocks"]),
        notes=tuple(head["notes"]),
    )


def _checked(entry: dict[str, Any], where: str) -> dict[str, Any]:
    if entry["kind"] != FORMAT:
        raise DeclarationError(
            f"{where} does not begin as a trace of phalanx does; expected one that px.trace(...) wrote"
        )
    if entry["version"] != VERSION:
        raise DeclarationError(
            f"{where} was written by another version of phalanx (format {entry['version']}, here {VERSION}); read it "
            "with that version"
        )
    return entry


def _track(entry: dict[str, Any]) -> Track:
    return Track(
        key=TrackKey(*entry["key"]),
        host=entry["host"],
        node=entry["node"],
        pid=entry["pid"],
        accelerators=tuple(entry["accelerators"]),
        opened=entry["opened"],
        closed=entry["closed"],
    )


def _call(entry: dict[str, Any], zero: int) -> Call:
    began = entry["began"] + zero
    times = {name: _plus(entry[name], began) for name in _CALL_TIMES}
    return Call(
        id=entry["id"],
        group=entry["group"],
        epoch=entry["epoch"],
        role=entry["role"],
        method=entry["method"],
        began=began,
        stored_bytes=entry["stored_bytes"],
        error=entry["error"],
        sources=tuple(entry["sources"]),
        parts=tuple(_part(part, began) for part in entry["parts"]),
        **times,
    )


def _part(entry: list[Any], zero: int) -> Part:
    rank, *rest = entry
    count = len(_PART_TIMES)
    times = {name: _plus(time, zero) for name, time in zip(_PART_TIMES, rest[:count], strict=True)}
    sizes = dict(zip(_PART_SIZES, rest[count:], strict=False))
    error, items = (*rest[count + len(_PART_SIZES) :], None, None)[:2]
    return Part(rank, **times, **sizes, error=error, items=items)


def _span(entry: dict[str, Any], zero: int) -> Span:
    return Span(
        name=entry["name"],
        began=entry["began"] + zero,
        ended=_plus(entry["ended"], zero),
        track=None if entry["track"] is None else TrackKey(*entry["track"]),
        call=entry["call"],
        attributes=dict(entry["attributes"]),
        error=entry["error"],
    )


def _counter(entry: dict[str, Any], zero: int) -> Counter:
    values = {name: tuple(series) for name, series in entry["values"].items()}
    return Counter(entry["name"], tuple(time + zero for time in entry["at"]), values)


def _less(time: int | None, zero: int) -> int | None:
    return None if time is None else time - zero


def _plus(time: int | None, zero: int) -> int | None:
    return None if time is None else time + zero
