"""Traces in the JSON format of Perfetto's UI and chrome://tracing.

The format: "Trace Event Format" (Google, 2016). Complete events ("X") for slices, metadata ("M") for names and order,
flow events ("s", "f") for the arrows, counters ("C"). Times are microseconds since the start of the trace. The file
also has the trace itself under the key "phalanx", which viewers ignore and ``phalanx trace`` reads.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from phalanx.tracing.events import Trace, TrackKey
from phalanx.tracing.slices import drawn_tracks, sources_of

DRIVER_PID = 1


def to_chrome(trace: Trace, entries: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the text of the file in pieces; a long trace has millions of events.

    ``entries`` are the trace itself as plain data.
    """
    head = json.dumps({"title": trace.title, "host": trace.host, "began_ns": str(trace.began)})
    yield f'{{"displayTimeUnit":"ms","otherData":{head}'
    for key, items in (("traceEvents", events(trace)), ("phalanx", entries)):
        yield f',"{key}":['
        for number, item in enumerate(items):
            yield ("," if number else "") + json.dumps(item, separators=(",", ":"), default=str)
        yield "]"
    yield "}"


def events(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield the events of the file: names first, then slices, counters and arrows."""
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
