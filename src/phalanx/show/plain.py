"""Traces as plain data, for JSON: what every file format of ours that can be read back carries.

Times are written relative to what they belong to, so that files of long runs stay small: those of calls and spans to
the start of the trace, those of parts to the start of their call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from phalanx.errors import DeclarationError
from phalanx.tracing.events import Call, Clock, Part, Span, Trace, Track, TrackKey

FORMAT = "phalanx-trace"
VERSION = 1

_PART_TIMES = ("encoded", "sent", "received", "started", "finished", "returned", "fetched")
_PART_SIZES = ("message_bytes", "argument_bytes", "result_bytes")
_CALL_TIMES = ("planned", "asked", "joined", "ended")


def records(trace: Trace) -> Iterator[dict[str, Any]]:
    """The trace as one record after another: what it is, then its tracks, calls and spans."""
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


def from_records(found: Iterable[dict[str, Any]], where: str) -> Trace:
    """The trace that :func:`records` gave; records of kinds that are not known are left out.

    Raises:
        DeclarationError: they are not those of a trace; ``where`` says in the message what was read.
    """
    try:
        return _trace(found, where)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DeclarationError(
            f"{where} is not a trace of phalanx, or it is damaged: {type(error).__name__}: {error}"
        ) from error


def _trace(found: Iterable[dict[str, Any]], where: str) -> Trace:
    head: dict[str, Any] | None = None
    tracks: list[Track] = []
    calls: list[Call] = []
    spans: list[Span] = []
    for record in found:
        kind = record["kind"]
        if head is None:
            head = _checked(record, where)
        elif kind == "track":
            tracks.append(_track(record))
        elif kind == "call":
            calls.append(_call(record, head["began"]))
        elif kind == "span":
            spans.append(_span(record, head["began"]))
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
        clocks=tuple(Clock(**clock) for clock in head["clocks"]),
        notes=tuple(head["notes"]),
    )


def _checked(record: dict[str, Any], where: str) -> dict[str, Any]:
    if record["kind"] != FORMAT:
        raise DeclarationError(
            f"{where} does not begin as a trace of phalanx does; expected one that px.trace(...) wrote"
        )
    if record["version"] != VERSION:
        raise DeclarationError(
            f"{where} was written by another version of phalanx (format {record['version']}, here {VERSION}); read it "
            "with that version"
        )
    return record


def _track(record: dict[str, Any]) -> Track:
    return Track(
        key=TrackKey(*record["key"]),
        host=record["host"],
        node=record["node"],
        pid=record["pid"],
        accelerators=tuple(record["accelerators"]),
        opened=record["opened"],
        closed=record["closed"],
    )


def _call(record: dict[str, Any], zero: int) -> Call:
    began = record["began"] + zero
    times = {name: _plus(record[name], began) for name in _CALL_TIMES}
    return Call(
        id=record["id"],
        group=record["group"],
        epoch=record["epoch"],
        role=record["role"],
        method=record["method"],
        began=began,
        stored_bytes=record["stored_bytes"],
        error=record["error"],
        sources=tuple(record["sources"]),
        parts=tuple(_part(part, began) for part in record["parts"]),
        **times,
    )


def _part(record: list[Any], zero: int) -> Part:
    rank, *rest = record
    count = len(_PART_TIMES)
    times = {name: _plus(time, zero) for name, time in zip(_PART_TIMES, rest[:count], strict=True)}
    sizes = dict(zip(_PART_SIZES, rest[count:], strict=False))
    error = rest[count + len(_PART_SIZES) :]
    return Part(rank, **times, **sizes, error=error[0] if error else None)


def _span(record: dict[str, Any], zero: int) -> Span:
    return Span(
        name=record["name"],
        began=record["began"] + zero,
        ended=_plus(record["ended"], zero),
        track=None if record["track"] is None else TrackKey(*record["track"]),
        call=record["call"],
        attributes=dict(record["attributes"]),
        error=record["error"],
    )


def _less(time: int | None, zero: int) -> int | None:
    return None if time is None else time - zero


def _plus(time: int | None, zero: int) -> int | None:
    return None if time is None else time + zero
