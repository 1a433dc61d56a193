"""Traces as one HTML page that needs nothing else: timeline, tables, and the user's own curves."""

from __future__ import annotations

import datetime
import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from phalanx.display.byte_format import size
from phalanx.display.tables import Table
from phalanx.tracing.counters import resampled
from phalanx.tracing.events import STARTING, Call, Trace
from phalanx.tracing.report import Report, report
from phalanx.tracing.slices import Slice, driver_slices, rank_slices

_KINDS = {"call": 0, "phase": 1, "span": 2}
_MANY_SLICES = 150_000
_SHORT_NS = 100_000

_CURVE_POINTS = 320
_WORDS = {
    "plan": "Deciding which rank gets what.",
    "send": "Encoding the arguments and handing each rank's message to the backend.",
    "in the background": "The call runs, or has ended, and nobody has asked for its value yet.",
    "wait": "Somebody waits for ranks to return.",
    "fetch": "Outputs come to the driver and are decoded.",
    "join": "Outputs are put together to the call's value.",
    "await results": "On a rank: an argument is the result of a call that has not returned yet.",
    "arguments": "On a rank: fetching and decoding what the method gets; also the first import of what these need.",
    "return": "On a rank: encoding and storing the output.",
    "queued": "A message waits because its rank is still at another call.",
    "idle": "Of the time in which ranks held an accelerator and were ready, the share in which none was at a call.",
}


def to_html(trace: Trace, charts: Mapping[str, Sequence[float]] | None = None) -> Iterator[str]:
    """The text of the page, in pieces; ``charts`` are curves to show above the timeline, by name.

    Nothing is loaded from elsewhere.
    """
    made = report(trace)
    title = html.escape(trace.title or "Trace")
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    yield f'<title>{title}</title>\n<link rel="icon" href="data:,">\n'
    yield f"<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n<main>\n"
    yield _header(trace, title)
    yield _tiles(trace, made)
    if made.notes:
        yield (
            '<div class="card notes">'
            + "".join(f"<p>{html.escape(note)}</p>" for note in made.notes)
            + "</div>\n"
        )
    curves = "".join(_chart(name, list(values)) for name, values in (charts or {}).items())
    if curves:
        yield f'<section class="card charts">{curves}</section>\n'
    yield _TIMELINE
    counted = "".join(_counters(trace))
    if counted:
        yield f'<section class="card charts many">{counted}</section>\n'
    for table in made.tables:
        heading = f"<h2>{html.escape(table.title)}</h2>"
        yield f'<section class="card">{heading}<div class="wide">{_table(table)}</div></section>\n'
    words = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in _WORDS.items())
    yield f'<details class="card"><summary>What the words mean</summary><dl>{words}</dl></details>\n'
    yield '</main>\n<div class="tip"></div>\n<script type="application/json" id="data">'
    yield json.dumps(_data(trace), separators=(",", ":"), default=str).replace("<", "\\u003c")
    yield f"</script>\n<script>\n{_asset('page.js')}</script>\n</body>\n</html>\n"


def _asset(name: str) -> str:
    return files("phalanx.tracing").joinpath("page").joinpath(name).read_text(encoding="utf-8")


def _header(trace: Trace, title: str) -> str:
    when = datetime.datetime.fromtimestamp(trace.began / 1e9).astimezone()
    below = f"{when:%Y-%m-%d %H:%M:%S %Z}, driver {trace.host}, process {trace.pid}"
    return (
        f'<header><div><h1>{title}</h1><div class="soft">{html.escape(below)}</div></div>'
        '<button id="theme" title="light or dark">◐</button></header>\n'
    )


def _tiles(trace: Trace, made: Report) -> str:
    calls = [call for call in trace.calls if call.method != STARTING]
    failed = sum(call.error is not None for call in calls)
    sent = sum(call.stored_bytes + sum(part.message_bytes for part in call.parts) for call in calls)
    back = sum(part.result_bytes for call in calls for part in call.parts)
    tiles = [
        (_seconds(trace.ended - trace.began), "traced"),
        (f"{len(calls):,}", "calls"),
        (f"{failed:,}", "failed"),
        (f"{len(trace.tracks):,}", "ranks"),
        (size(sent), "sent and stored"),
        (size(back), "returned by ranks"),
    ]
    idle = [row[4] for row in made.accelerators.rows]
    if idle and any(track.accelerators for track in trace.tracks):  # of processes a mean says nothing
        tiles.append((f"{sum(idle) / len(idle):.0f} %", "idle, mean of accelerators"))
    if made.skew.rows:
        worst = max(made.skew.rows, key=lambda row: row[4])
        tiles.append((f"{worst[4]:.2f}x", f"slowest / mean in {worst[0]}"))
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile{" bad" if name == "failed" and failed else ""}"><b>{html.escape(value)}</b>'
            f"<span>{html.escape(name).replace('.', '.<wbr>')}</span></div>"
            for value, name in tiles
        )
        + "</div>\n"
    )


_TIMELINE = """<section class="card">
<div class="bar"><h2>Timeline</h2>
<span class="soft">drag to move, Ctrl + wheel to zoom, click for a call's ranks, double-click to fill the view</span>
<button id="in" title="zoom in (W)">+</button>
<button id="out" title="zoom out (S)">&minus;</button>
<button id="all" title="all (0)">all</button></div>
<div class="legend"></div>
<canvas class="axis"></canvas>
<div class="view" tabindex="0" aria-label="timeline"><canvas></canvas><div class="labels"></div></div>
<div class="chosen"></div>
</section>
"""


def _table(table: Table) -> str:
    numeric = [
        any(isinstance(row[i], int | float) for row in table.rows)
        and all(row[i] is None or isinstance(row[i], int | float) for row in table.rows)
        for i in range(len(table.columns))
    ]
    most = [
        max((float(row[i] or 0) for row in table.rows), default=0.0) if is_number else 0.0
        for i, is_number in enumerate(numeric)
    ]
    head = "".join(
        f'<th class="{"number" if is_number else "text"}">{html.escape(name)}</th>'
        for name, is_number in zip(table.columns, numeric, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            _cell(name, value, is_number, top)
            for name, value, is_number, top in zip(table.columns, row, numeric, most, strict=True)
        )
        + "</tr>"
        for row in table.rows
    )
    return f'<table class="sorts"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cell(column: str, value: Any, is_number: bool, most: float) -> str:
    if is_number:
        if value is None:
            return '<td class="number">-</td>'
        text = size(value) if "bytes" in column else _number(value)
        if column == "rank" or most <= 0:
            return f'<td class="number" data-value="{value}">{text}</td>'
        share = float(value) / (100.0 if "%" in column else most)
        style = f"--share:calc({share:.3f} * (100% - 20px))"
        return f'<td class="number share" data-value="{value}" style="{style}">{text}</td>'
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    name = ' class="error"' if column == "error" else ""
    return f"<td{name}>{'-' if value is None else html.escape(str(value))}</td>"


def _data(trace: Trace) -> dict[str, Any]:
    """What the page's script draws."""
    drivers, ranks = driver_slices(trace), rank_slices(trace)
    names: dict[str, int] = {}
    texts: dict[str, int] = {}
    count = sum(map(len, drivers.values())) + sum(map(len, ranks.values()))
    least = _SHORT_NS if count > _MANY_SLICES else 0
    places = {track.key: track.place for track in trace.tracks}
    tracks: list[dict[str, Any]] = []
    index_of = {call.id: index for index, call in enumerate(trace.calls)}

    def add(group: str, label: str, place: str, slices: Sequence[Slice], driver: bool) -> None:
        kept = [one for one in slices if one.kind != "phase" or one.duration >= least]
        flat = [number for one in kept for number in _numbers(one, trace.began, names, texts, index_of)]
        facts = {str(i): one.attributes for i, one in enumerate(kept) if one.attributes}
        tracks.append(
            {"group": group, "label": label, "place": place, "slices": flat, "facts": facts, "driver": driver}
        )

    for name, slices in drivers.items():
        add("driver", name, "", slices, True)
    order = {group: index for index, group in enumerate(trace.groups)}
    for key in sorted(ranks, key=lambda one: (order.get(one.group, 0), one.epoch, one.rank)):
        group = f"{key.group} (epoch {key.epoch})" if key.epoch else key.group
        add(group, f"rank {key.rank}", places.get(key, ""), ranks[key], False)
    methods = dict.fromkeys(names[call.name] for call in trace.calls if call.name in names)
    return {
        "length": trace.ended - trace.began,
        "names": list(names),
        "methods": list(methods),
        "texts": list(texts),
        "tracks": tracks,
        "calls": [_facts(call) for call in trace.calls],
    }


def _numbers(
    one: Slice, zero: int, names: dict[str, int], texts: dict[str, int], index_of: Mapping[int, int]
) -> tuple[int, ...]:
    name = names.setdefault(one.name, len(names))
    text = -1 if one.error is None else texts.setdefault(one.error, len(texts))
    call = index_of.get(one.call, -1) if one.call is not None else -1
    return (
        one.start - zero,
        one.duration,
        one.lane,
        one.depth,
        name,
        _KINDS[one.kind],
        call,
        int(one.open),
        text,
    )


def _facts(call: Call) -> dict[str, Any]:
    return {
        "group": call.group,
        "name": call.name,
        "ranks": len(call.parts),
        "sent": sum(part.message_bytes for part in call.parts),
        "stored": call.stored_bytes,
        "back": sum(part.result_bytes for part in call.parts),
    }


def _counters(trace: Trace) -> Iterator[str]:
    """A curve for each series of each counter, over the time of the trace."""
    seconds = (trace.ended - trace.began) / 1e9
    for counter in trace.counters:
        for name, values in counter.values.items():
            curve = resampled(counter, values, trace.began, trace.ended, _CURVE_POINTS)
            yield _chart(f"{counter.name}: {name}, over {seconds:.3g} s", curve, seconds)


def _chart(name: str, values: list[float], seconds: float | None = None) -> str:
    """One curve as SVG: each value faint, their running mean strong. The values are numbered, or lie over seconds."""
    wide, high, left, bottom, top = 640, 220, 46, 26, 10
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return f'<div class="chart"><h2>{html.escape(name)}</h2><p class="soft">no values</p></div>'
    low, most = min([*known, 0.0]), max(known)
    marks = _marks(low, most if most > low else low + 1.0, 4)
    low, most = marks[0], marks[-1]
    left = max(left, 10 + 7 * max(len(_mark(value)) for value in marks))
    window = max(1, len(values) // 30)

    def x(index: float) -> float:
        return left + (wide - left - 8) * index / max(1, len(values) - 1)

    def y(value: float) -> float:
        return top + (high - top - bottom) * (most - value) / (most - low)

    def line(points: Sequence[float]) -> str:
        return " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(points) if math.isfinite(v))

    parts = [f'<div class="chart"><h2>{html.escape(name)}</h2><svg viewBox="0 0 {wide} {high}" role="img">']
    for value in marks:
        parts.append(
            f'<line class="grid" x1="{left}" x2="{wide - 8}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        )
        parts.append(f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{_mark(value)}</text>')
    last = max(1, len(values) - 1)
    if seconds:
        under = [(last * at / seconds, _mark(at)) for at in _marks(0.0, seconds, 5) if at <= seconds]
    else:
        under = [
            (place, str(place + 1)) for place in (round((len(values) - 1) * tick / 5) for tick in range(6))
        ]
    for place, label in under:
        anchor = "end" if place > 0.97 * last else "middle"
        parts.append(f'<text x="{x(place):.1f}" y="{high - 6}" text-anchor="{anchor}">{label}</text>')
    means = [_mean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]
    parts.append(
        f'<polyline class="each" points="{line(values)}"/><polyline class="mean" points="{line(means)}"/>'
    )
    parts.append("</svg></div>")
    return "".join(parts)


def _marks(low: float, most: float, parts: int) -> list[float]:
    """Round numbers at even distances, about ``parts`` of them, from ``low`` or below to ``most`` or above."""
    rough = (most - low) / parts
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(one * power for one in (1, 2, 2.5, 5, 10) if one * power >= rough * (1 - 1e-9))
    return [step * place for place in range(math.floor(low / step), math.ceil(most / step - 1e-9) + 1)]


def _mark(value: float) -> str:
    """A number at an axis: 0.25, 7.5, 12,500."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _seconds(ns: int) -> str:
    seconds = ns / 1e9
    if seconds >= 120:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _number(value: float) -> str:
    if isinstance(value, int) or value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


__all__ = ["to_html"]
