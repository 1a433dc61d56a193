"""Files of traces: a report as ``.html``, and ``.json`` for Perfetto's UI and chrome://tracing.

The JSON file has the "Trace Event Format" (Google, 2016): complete events ("X") for slices, metadata ("M") for names
and order, flow events ("s", "f") for the arrows, counters ("C"). Their times are microseconds since the start of the
trace. Under the key "phalanx", which viewers ignore, is the trace itself: its head, then a list of each event's values.
"""

from __future__ import annotations

import itertools
import json
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import DeclarationError
from phalanx.tracing.events import Counter, RankSpan, Span, Trace, TracedCall, Track, TrackKey
from phalanx.tracing.html import to_html
from phalanx.tracing.slices import drawn_tracks, sources_of

DRIVER_PID = 1
_VERSION = 4
_HEAD = ("began", "ended", "host", "pid", "title", "notes")
_KINDS = {"track": Track, "call": TracedCall, "span": Span, "counter": Counter}
#: Functions that restore the values of fields from lists.
_RESTORED: Mapping[str, Any] = {
    "key": lambda key: TrackKey(*key),
    "track": lambda key: None if key is None else TrackKey(*key),
    "parts": lambda parts: tuple(RankSpan(*part) for part in parts),
    "values": lambda values: {name: tuple(series) for name, series in values.items()},
    **dict.fromkeys(("accelerators", "sources", "at"), tuple),
}


def check_path(path: Path) -> None:
    """Check that the suffix names a format.

    Raises:
        DeclarationError: if the suffix is unknown.
    """
    if path.suffix not in (".json", ".html"):
        raise DeclarationError(
            f"{path}: the suffix of a trace's file names its format; expected .json (for Perfetto) or .html"
        )


def check_writable(path: Path) -> None:
    """Create the folder of a trace, and check that it is writable.

    Raises:
        DeclarationError: if it is not writable, with the system's reason.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise DeclarationError(
            f"{path}: the trace could not be written there when it ends: {error.strerror or error}; expected a path "
            "in a folder that this process may write to"
        ) from error


def write(trace: Trace, path: Path, charts: Mapping[str, Sequence[float]] | None = None) -> Path:
    """Write a trace, completely or not at all, and return ``path``. ``charts`` are curves for an HTML report.

    Raises:
        DeclarationError: if the suffix is unknown.
        OSError: if the file cannot be written.
    """
    check_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    pieces = to_json(trace) if path.suffix == ".json" else [to_html(trace, charts)]
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with unfinished.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(pieces)
        unfinished.replace(path)
    except OSError as error:  # that of a full disk names no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def load(path: Path) -> Trace:
    """Read a trace from a ``.json`` file.

    Raises:
        DeclarationError: if the file is not a trace of Phalanx, or was written by another version.
        OSError: if the file cannot be read.
    """
    if path.suffix != ".json":
        raise DeclarationError(
            f"{path}: expected a trace that px.trace wrote as .json; .html is for browsers only"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON or of UTF-8
        raise DeclarationError(f"{path} is not valid JSON, or was truncated: {error}") from error
    entries = content.get("phalanx") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries or not isinstance(entries[0], dict):
        raise DeclarationError(f"{path} is not a trace; expected a file that px.trace(...) wrote")
    try:
        head, *rows = entries
        version = head.pop("version")
        if version != _VERSION:
            raise DeclarationError(
                f"{path} was written by another version of phalanx (format {version}, here {_VERSION}); read it with "
                "that version"
            )
        events = {
            f"{kind}s": tuple(_event(cls, values) for name, values in rows if name == kind)
            for kind, cls in _KINDS.items()
        }
        return Trace(**head | {"notes": tuple(head["notes"])} | events)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DeclarationError(
            f"{path} is not a trace of phalanx, or it is damaged: {type(error).__name__}: {error}"
        ) from error


def _event(cls: type, values: Sequence[Any]) -> Any:
    """Return the event of class ``cls`` from the values of its fields in a file."""
    event = dict(zip((field.name for field in fields(cls)), values, strict=True))
    return cls(**event | {name: _RESTORED[name](event[name]) for name in _RESTORED.keys() & event.keys()})


def to_json(trace: Trace) -> Iterator[str]:
    """Yield the text of a ``.json`` file in pieces; a long trace has millions of events."""
    facts = {"title": trace.title, "host": trace.host, "began_ns": str(trace.began)}
    yield f'{{"displayTimeUnit":"ms","otherData":{_text(facts)}'
    for key, items in (("traceEvents", chrome_events(trace)), ("phalanx", entries(trace))):
        yield f',"{key}":['
        for number, item in enumerate(items):
            yield ("," if number else "") + _text(item)
        yield "]"
    yield "}"


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    """Return an event as the list of its fields' values, and any other object that JSON does not know as text."""
    return [getattr(value, field.name) for field in fields(value)] if is_dataclass(value) else str(value)


def entries(trace: Trace) -> Iterator[Any]:
    """Yield the trace itself: its head, then each event with its kind."""
    yield {"version": _VERSION, **{name: getattr(trace, name) for name in _HEAD}}
    for kind in _KINDS:
        for event in getattr(trace, f"{kind}s"):
            yield kind, event


def chrome_events(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield the events for viewers: names first, then slices, counters and arrows."""
    tracks = drawn_tracks(trace)
    threads: dict[tuple[TrackKey | str, int], dict[str, int]] = {}
    pids: dict[tuple[bool, str], int] = {(True, "driver"): DRIVER_PID}
    yield from _names("process", {"pid": DRIVER_PID, "tid": 0}, f"driver {trace.host} ({trace.pid})", 0)
    for track in tracks:
        process = (isinstance(track.key, str), track.group)
        if process not in pids:
            pid = pids[process] = len(pids) + 1
            yield from _names("process", {"pid": pid, "tid": 0}, f"group {track.group}", pid)
        name = " · ".join([track.label, *([track.place, str(track.pid)] if track.place else [])])
        for lane in range(1 + max((one.lane for one in track.slices), default=0)):
            threads[track.key, lane] = thread = {"pid": pids[process], "tid": len(threads) + 1}
            yield from _names("thread", thread, f"{name} ({lane + 1})" if lane else name, thread["tid"])
    called: dict[Any, dict[str, int]] = {}  # threads of calls, by track and call
    for track in tracks:
        for one in track.slices:
            more = {"call": one.call, "error": one.error, "unfinished": one.open or None}
            args = one.attributes | {name: value for name, value in more.items() if value is not None}
            times = {"ts": (one.start - trace.began) / 1e3, "dur": (one.end - one.start) / 1e3}
            thread = threads[track.key, one.lane]
            yield {"ph": "X", "name": one.name, "cat": one.kind, **thread, **times, "args": args}
            if one.kind == "call":
                called[track.key, one.call] = thread
    for counter in trace.counters:
        for index, at in enumerate(counter.at):
            values = {name: series[index] for name, series in counter.values.items()}
            place = {"pid": DRIVER_PID, "tid": 0, "ts": (at - trace.began) / 1e3}
            yield {"ph": "C", "name": counter.name, **place, "args": values}
    yield from _arrows(trace, called)


def _names(kind: str, thread: dict[str, int], name: str, order: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", **thread, "name": f"{kind}_name", "args": {"name": name}}
    yield {"ph": "M", **thread, "name": f"{kind}_sort_index", "args": {"sort_index": order}}


def _arrows(trace: Trace, at: Mapping[Any, dict[str, int]]) -> Iterator[dict[str, Any]]:
    """Yield the arrows from the driver to each rank, and from a call to the call that got its result by reference."""
    numbers = itertools.count(1)
    calls = {call.id: call for call in trace.calls}

    def arrow(name: str, start: dict[str, int], start_at: int, end: dict[str, int], end_at: int) -> Any:
        common = {"id": next(numbers), "name": name, "cat": "flow"}
        yield {"ph": "s", **common, **start, "ts": (min(start_at, end_at) - trace.began) / 1e3}
        yield {"ph": "f", "bp": "e", **common, **end, "ts": (end_at - trace.began) / 1e3}

    for call in trace.calls:
        for index, part in enumerate(call.parts):
            if part.received is None:
                continue
            rank = at[call.key(part), call.id]
            yield from arrow("call", at[call.group, call.id], call.sent or call.began, rank, part.received)
            for source, source_part in sources_of(call, index, calls):
                start = at.get((source.key(source_part), source.id))
                if start is not None and source_part.returned is not None:
                    yield from arrow("result", start, source_part.returned, rank, part.received)
