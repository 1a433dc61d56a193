"""What a trace says, as tables: where time and bytes went, which rank is late, what lay idle. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from phalanx.display.tables import Table
from phalanx.tracing.counters import channels_table
from phalanx.tracing.durations import (
    arguments_ns,
    awaited_ns,
    busy_ns,
    clipped,
    parts_by_track,
    ready_at,
    run_ns,
    union,
    waits_ns,
)
from phalanx.tracing.events import STARTING, Call, Trace, Track, TrackKey
from phalanx.tracing.saves import saves_table
from phalanx.tracing.weight_report import weights_table

_MS = 1e6


@dataclass(frozen=True)
class Report:
    """The tables of a trace; ``str()`` is for terminals, ``to_dict()`` for programs."""

    title: str
    methods: Table
    skew: Table
    ranks: Table
    accelerators: Table
    phases: Table
    traffic: Table
    weights: Table
    channels: Table
    saves: Table
    failures: Table
    notes: tuple[str, ...] = ()

    @property
    def tables(self) -> tuple[Table, ...]:
        """All tables that have rows, in reading order."""
        every = (
            self.methods,
            self.skew,
            self.ranks,
            self.accelerators,
            self.phases,
            self.traffic,
            self.weights,
            self.channels,
            self.saves,
            self.failures,
        )
        return tuple(table for table in every if table.rows)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        names = (
            "methods",
            "skew",
            "ranks",
            "accelerators",
            "phases",
            "traffic",
            "weights",
            "channels",
            "saves",
            "failures",
        )
        found = {name: getattr(self, name).to_dict()["rows"] for name in names}
        return {"title": self.title, **found, "notes": list(self.notes)}

    def __str__(self) -> str:
        return "\n\n".join([self.title, *map(str, self.tables), *self.notes])

    def __rich__(self) -> Any:
        from rich.console import Group  # only where something is shown

        return Group(self.title, *(table.__rich__() for table in self.tables), *self.notes)


def report(trace: Trace) -> Report:
    """The tables of a trace."""
    seconds = (trace.ended - trace.began) / 1e9
    ranks = len({track.key for track in trace.tracks})
    calls = [call for call in trace.calls if call.method != STARTING]
    title = (
        f"{trace.title or 'trace'}: {seconds:.3g} s, {len(calls)} calls of {len(trace.groups)} groups on "
        f"{ranks} ranks"
    )
    return Report(
        title=title,
        methods=_methods(trace),
        skew=_skew(trace),
        ranks=_ranks(trace),
        accelerators=_accelerators(trace),
        phases=_phases(trace),
        traffic=_traffic(trace),
        weights=weights_table(trace),
        channels=channels_table(trace),
        saves=saves_table(trace),
        failures=_failures(trace),
        notes=(*trace.notes, *_clock_notes(trace)),
    )


def _by_method(calls: Iterable[Call]) -> dict[str, list[Call]]:
    found: dict[str, list[Call]] = {}
    for call in calls:
        found.setdefault(_label(call), []).append(call)
    return found


def _label(call: Call) -> str:
    return f"{call.group}.{call.name}"


def _methods(trace: Trace) -> Table:
    rows: list[tuple[Any, ...]] = []
    for name, calls in _by_method(trace.calls).items():
        ends = [(call.began, call.ended if call.ended is not None else call.returned) for call in calls]
        took = [(end - began) / _MS for began, end in ends if end is not None]
        ran = [ns / _MS for call in calls for part in call.parts if (ns := run_ns(part)) is not None]
        rows.append(
            (
                name,
                len(calls),
                sum(call.error is not None for call in calls),
                _round(sum(took)) if took else None,
                _round(statistics.median(took)) if took else None,
                _round(max(took)) if took else None,
                _round(statistics.median(ran)) if ran else None,
            )
        )
    rows.sort(key=lambda row: -(row[3] or 0.0))
    columns = (
        "call",
        "calls",
        "failed",
        "total ms",
        "median ms",
        "longest ms",
        "on a rank ms",
    )
    return Table(
        "Calls, from plan to value or last return; the last column is the method itself", columns, tuple(rows)
    )


def _skew(trace: Trace) -> Table:
    """Of methods that ran on several ranks: how far apart these are, and who keeps the others waiting."""
    rows: list[tuple[Any, ...]] = []
    calls_made = [call for call in trace.calls if call.method != STARTING]
    for name, calls in _by_method(calls_made).items():
        spreads: list[float] = []
        ratios: list[float] = []
        last: Counter[int] = Counter()
        for call in calls:
            ran = {part.rank: ns for part in call.parts if (ns := run_ns(part)) is not None}
            if len(ran) < 2:
                continue
            spreads.append((max(ran.values()) - min(ran.values())) / _MS)
            ratios.append(max(ran.values()) / max(1.0, statistics.fmean(ran.values())))
            ended = {part.rank: part.finished for part in call.parts if part.finished is not None}
            last[max(ended, key=lambda rank: (ended[rank], rank))] += 1
        if spreads:
            rank, times = last.most_common(1)[0]
            share = round(100 * times / len(spreads))
            rows.append(
                (
                    name,
                    len(spreads),
                    _round(statistics.median(spreads)),
                    _round(max(spreads)),
                    _round(statistics.median(ratios)),
                    f"rank {rank}",
                    share,
                )
            )
    rows.sort(key=lambda row: -row[2] * row[1])
    columns = (
        "call",
        "calls",
        "median ms",
        "largest ms",
        "slowest / mean",
        "last",
        "in % of calls",
    )
    return Table(
        "Skew: how far apart the ranks of a call are, and which is most often the last", columns, tuple(rows)
    )


def _ranks(trace: Trace) -> Table:
    tracks = {track.key: track for track in trace.tracks}
    last: Counter[TrackKey] = Counter()
    for call in trace.calls:
        ended = [part for part in call.parts if part.finished is not None]
        if len(ended) > 1:
            last[call.key(max(ended, key=lambda part: (part.finished or 0, part.rank)))] += 1
    rows: list[tuple[Any, ...]] = []
    calls = {call.id: call for call in trace.calls}
    for key, found in parts_by_track(trace).items():
        parts = [call.parts[index] for call, index in found if call.method != STARTING]
        ran = sum(run_ns(part) or 0 for part in parts)
        arguments = sum(arguments_ns(call, i, calls) for call, i in found if call.method != STARTING)
        track = tracks.get(key)
        rows.append(
            (
                key.group + (f" (epoch {key.epoch})" if key.epoch else ""),
                key.rank,
                track.place if track else None,
                len(parts),
                _round(ran / _MS),
                _round(arguments / _MS),
                last[key],
                sum(part.error is not None for part in parts),
            )
        )
    rows.sort(key=lambda row: -row[4])
    columns = (
        "group",
        "rank",
        "place",
        "calls",
        "methods ms",
        "arguments ms",
        "times last",
        "failed",
    )
    return Table("Ranks, the slowest first", columns, tuple(rows))


def _accelerators(trace: Trace) -> Table:
    """In what share of its time nobody was at work on an accelerator. Where no rank has one, each process is a place of
    its own; else those without one do not count."""
    places: dict[str, list[Track]] = {}
    for track in [track for track in trace.tracks if track.accelerators] or trace.tracks:
        places.setdefault(_place_of(track), []).append(track)
    parts = parts_by_track(trace)
    calls = {call.id: call for call in trace.calls}
    rows: list[tuple[Any, ...]] = []
    for place, tracks in places.items():
        windows: list[tuple[int, int]] = []
        busy: list[tuple[int, int]] = []
        for track in tracks:
            start = max(trace.began, track.opened or trace.began, ready_at(parts[track.key]))
            windows.append((start, max(start, min(track.closed or trace.ended, trace.ended))))
            busy += [
                time
                for call, index in parts[track.key]
                if call.method != STARTING and (time := busy_ns(call, index, calls, trace.ended)) is not None
            ]
        whole = union(windows)
        worked = union(clipped(busy, windows))
        if whole:
            idle = 100.0 * (1 - worked / whole)
            names = sorted({f"{track.key.group} rank {track.key.rank}" for track in tracks})
            rows.append((place, names, _round(whole / 1e9), _round(worked / 1e9), _round(idle)))
    rows.sort(key=lambda row: -row[4])
    columns = ("accelerator", "ranks on it", "held s", "at work s", "idle %")
    return Table("Idle time", columns, tuple(rows))


def _place_of(track: Track) -> str:
    if track.accelerators:
        return track.place
    return f"{track.place}, process {track.pid}"


def _phases(trace: Trace) -> Table:
    """Where the time of calls goes, in ms: sums over calls; those of ranks are means over the ranks of a call."""
    free: dict[TrackKey, int] = {}
    by_id = {call.id: call for call in trace.calls}
    waits: dict[int, tuple[float, float]] = {}
    for call in sorted(trace.calls, key=lambda one: one.began):
        waits[call.id] = waits_ns(call, free)
    rows: list[tuple[Any, ...]] = []
    for name, calls in _by_method(trace.calls).items():
        sums = [0.0] * 9
        for call in calls:
            places = range(len(call.parts))
            on_ranks = [
                statistics.fmean([awaited_ns(call, i, by_id) for i in places] or [0]),
                statistics.fmean([arguments_ns(call, i, by_id) for i in places] or [0]),
                _mean((p.finished, p.started) for p in call.parts),
                _mean((p.returned, p.finished) for p in call.parts),
            ]
            fetch = _between(call.fetched, max(call.returned or 0, call.asked or 0) or None)
            own = [_between(call.planned, call.began), _between(call.sent, call.planned or call.began)]
            values = [*own, *waits[call.id], *on_ranks, fetch + _between(call.joined, call.fetched)]
            sums = [total + value for total, value in zip(sums, values, strict=True)]
        rows.append((name, *(_round(total / _MS) for total in sums)))
    rows.sort(key=lambda row: -sum(row[1:]))
    columns = (
        "call",
        "plan",
        "send",
        "queued",
        "on the way",
        "awaiting",
        "arguments",
        "method",
        "return",
        "fetch",
    )
    return Table("Where the time goes, in ms; for ranks the mean over them", columns, tuple(rows))


def _mean(pairs: Iterable[tuple[int | None, int | None]]) -> float:
    found = [end - start for end, start in pairs if end is not None and start is not None]
    return statistics.fmean(found) if found else 0.0


def _between(end: int | None, start: int | None) -> float:
    return 0.0 if end is None or start is None else float(max(0, end - start))


def _traffic(trace: Trace) -> Table:
    rows: list[tuple[Any, ...]] = []
    for name, calls in _by_method(trace.calls).items():
        parts = [part for call in calls for part in call.parts]
        rows.append(
            (
                name,
                len(calls),
                sum(part.message_bytes for part in parts),
                sum(call.stored_bytes for call in calls),
                sum(part.argument_bytes for part in parts),
                sum(part.result_bytes for part in parts),
            )
        )
    rows.sort(key=lambda row: -(row[3] + row[4] + row[5]))
    columns = (
        "call",
        "calls",
        "message bytes",
        "stored bytes",
        "decoded bytes",
        "returned bytes",
    )
    return Table("Bytes by method", columns, tuple(rows))


def _failures(trace: Trace) -> Table:
    rows: list[tuple[Any, ...]] = []
    for call in trace.calls:
        at = _round((call.began - trace.began) / 1e9)
        rows += [(at, _label(call), f"rank {part.rank}", part.error) for part in call.parts if part.error]
        if call.error is not None and not any(part.error for part in call.parts):
            rows.append((at, _label(call), None, call.error))
    return Table("Failures", ("at s", "call", "rank", "error"), tuple(rows))


def _clock_notes(trace: Trace) -> tuple[str, ...]:
    return tuple(
        f"The clock of {clock.host} is {clock.offset / _MS:+.3f} ms from the driver's (± "
        f"{clock.uncertainty / _MS:.3f} ms); times of its ranks are corrected by that."
        for clock in trace.clocks
    )


def _round(value: float) -> float:
    """Four digits."""
    return float(f"{value:.4g}")
