"""Traces in the JSON that Perfetto's UI and chrome://tracing open, and in JSON lines.

The format: "Trace Event Format" (Google, 2016). Complete events ("X") for slices, metadata ("M") for names and order,
flow events ("s", "f") for the arrows, counters ("C") for what waits in channels. Times are microseconds, here since the
start of the trace. Besides these the file holds the trace itself under the key "phalanx", which viewers pass over and
``phalanx trace`` reads.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from phalanx.tracing.entries import entries
from phalanx.tracing.events import Counter, Trace, TrackKey
from phalanx.tracing.slices import Slice, driver_slices, rank_slices, sources_of

DRIVER_PID = 1


def to_chrome(trace: Trace) -> Iterator[str]:
    """The text of the file, in pieces."""
    yield '{"displayTimeUnit":"ms","otherData":'
    yield json.dumps({"title": trace.title, "host": trace.host, "began_ns": str(trace.began)})
    yield ',"traceEvents":[\n'
    separator = ""
    for event in events(trace):
        yield separator + json.dumps(event, separators=(",", ":"), default=str)
        separator = ",\n"
    yield '\n],"phalanx":[\n'
    separator = ""
    for entry in entries(trace):
        yield separator + json.dumps(entry, separators=(",", ":"), default=str)
        separator = ",\n"
    yield "\n]}\n"


def to_jsonl(trace: Trace) -> Iterator[str]:
    """The trace as JSON lines, in pieces: what it is, then a line per track, call and span."""
    for entry in entries(trace):
        yield json.dumps(entry, separators=(",", ":"), default=str) + "\n"


def events(trace: Trace) -> Iterator[dict[str, Any]]:
    """The events of the file: names first, then slices, then arrows."""
    threads = itertools.count(1)
    tids: dict[tuple[Any, int], int] = {}
    drivers, ranks = driver_slices(trace), rank_slices(trace)
    yield from _process(DRIVER_PID, f"driver {trace.host} ({trace.pid})", 0)
    for name, slices in drivers.items():
        yield from _lanes(DRIVER_PID, name, name, slices, tids, threads)
    pids: dict[tuple[str, int], int] = {}
    for key in sorted(ranks, key=lambda one: (trace.groups.index(one.group), one.epoch, one.rank)):
        if (key.group, key.epoch) not in pids:
            pid = pids[key.group, key.epoch] = DRIVER_PID + 1 + len(pids)
            epoch = f" (epoch {key.epoch})" if key.epoch else ""
            yield from _process(pid, f"group {key.group}{epoch}", pid)
        label = _label(trace, key)
        yield from _lanes(pids[key.group, key.epoch], key, label, ranks[key], tids, threads)
    for name, slices in drivers.items():
        yield from (_slice(one, DRIVER_PID, tids[name, one.lane], trace.began) for one in slices)
    for key, slices in ranks.items():
        pid = pids[key.group, key.epoch]
        yield from (_slice(one, pid, tids[key, one.lane], trace.began) for one in slices)
    for counter in trace.counters:
        yield from _counted(counter, trace.began)
    yield from _arrows(trace, drivers, ranks, pids, tids)


def _counted(counter: Counter, zero: int) -> Iterator[dict[str, Any]]:
    for place, at in enumerate(counter.at):
        values = {name: series[place] for name, series in counter.values.items()}
        yield {
            "ph": "C",
            "name": counter.name,
            "pid": DRIVER_PID,
            "tid": 0,
            "ts": (at - zero) / 1e3,
            "args": values,
        }


def _label(trace: Trace, key: TrackKey) -> str:
    track = next((one for one in trace.tracks if one.key == key), None)
    return f"rank {key.rank}" + (f" · {track.place} · {track.pid}" if track else "")


def _process(pid: int, name: str, order: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": order}}


def _lanes(
    pid: int,
    key: Any,
    label: str,
    slices: list[Slice],
    tids: dict[tuple[Any, int], int],
    threads: Iterator[int],
) -> Iterator[dict[str, Any]]:
    """A thread for each lane of a track, made known by name."""
    for lane in range(max((one.lane for one in slices), default=0) + 1):
        tid = tids[key, lane] = next(threads)
        name = label if lane == 0 else f"{label} ({lane + 1})"
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _slice(one: Slice, pid: int, tid: int, zero: int) -> dict[str, Any]:
    arguments: dict[str, Any] = dict(one.attributes)
    if one.call is not None:
        arguments["call"] = one.call
    if one.error is not None:
        arguments["error"] = one.error
    if one.open:
        arguments["unfinished"] = True
    made = {
        "ph": "X",
        "name": one.name,
        "cat": one.kind,
        "pid": pid,
        "tid": tid,
        "ts": (one.start - zero) / 1e3,
        "dur": one.duration / 1e3,
    }
    return {**made, "args": arguments} if arguments else made


def _arrows(
    trace: Trace,
    drivers: dict[str, list[Slice]],
    ranks: dict[TrackKey, list[Slice]],
    pids: dict[tuple[str, int], int],
    tids: dict[tuple[Any, int], int],
) -> Iterator[dict[str, Any]]:
    """From the driver to each rank, and from a call whose result is an argument to the call that got it."""
    numbers = itertools.count(1)
    calls = {call.id: call for call in trace.calls}
    on_driver = {
        one.call: (DRIVER_PID, tids[group, one.lane])
        for group, slices in drivers.items()
        for one in slices
        if one.kind == "call"
    }
    on_rank = {
        (key, one.call): (pids[key.group, key.epoch], tids[key, one.lane])
        for key, slices in ranks.items()
        for one in slices
        if one.kind == "call"
    }
    for call in trace.calls:
        for index, part in enumerate(call.parts):
            target = on_rank.get((call.key(part), call.id))
            if target is None or part.received is None:
                continue
            yield from _arrow(
                next(numbers),
                "call",
                on_driver[call.id],
                part.sent or call.began,
                target,
                part.received,
                trace.began,
            )
            for source in sources_of(call, index, calls):
                start = on_rank.get((calls[source[0].id].key(source[1]), source[0].id))
                at = source[1].returned
                if start is not None and at is not None:
                    yield from _arrow(next(numbers), "result", start, at, target, part.received, trace.began)


def _arrow(
    number: int,
    name: str,
    start: tuple[int, int],
    start_at: int,
    end: tuple[int, int],
    end_at: int,
    zero: int,
) -> Iterator[dict[str, Any]]:
    common = {"id": number, "name": name, "cat": "flow"}
    yield {"ph": "s", **common, "pid": start[0], "tid": start[1], "ts": (min(start_at, end_at) - zero) / 1e3}
    yield {"ph": "f", "bp": "e", **common, "pid": end[0], "tid": end[1], "ts": (end_at - zero) / 1e3}
