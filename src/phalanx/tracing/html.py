"""The HTML report of a trace: a self-contained page with headline figures, charts and a timeline."""

from __future__ import annotations

import datetime
import html
import itertools
import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from string import Template
from typing import Any

from phalanx.display.text_format import size
from phalanx.tracing.events import STARTING, Trace
from phalanx.tracing.slices import Slice, drawn_tracks
from phalanx.tracing.summary import idle_shares, summarize

_KINDS = {"call": 0, "phase": 1, "span": 2}
_PALETTE = (
    "#4c78d0", "#e0913a", "#489e68", "#9a72c9", "#2b9ca3",
    "#c39a1f", "#d06aa0", "#94704f", "#5fa9da", "#84933a",
)  # fmt: skip
_PHASES = {
    "await results": "#d5dae1",
    "arguments": "#d7b04a",
    "return": "#7fb6d9",
    "plan": "#b79ce0",
    "send": "#8fb7e8",
    "start processes": "#8fb7e8",
    "wait": "#b9c1cc",
    "in the background": "#d5dae1",
    "fetch": "#7fc4a0",
    "join or read": "#e0a56b",
}
_FIRST, _GAP, _HEADING = 16, 4, 24  # heights in the timeline: of a call, between tracks, of a group's name
_MANY_SLICES = 150_000
_SHORT_NS = 100_000
_WIDTH, _HEIGHT, _TOP, _BOTTOM, _RIGHT = 640, 220, 10, 26, 8  # of a chart
_DIGIT_WIDTH = 8  # of a digit of the largest font of labels
_POINTS = 320
_MOST = 1e300  # larger values and NaN are not drawn
_CALLS = "Calls, from the plan to the value or the last return"
_RANK_COUNTER = re.compile(r"^(.*) rank (\d+)$")


def to_html(trace: Trace, charts: Mapping[str, Sequence[float]] | None = None) -> str:
    """Return the text of the page, which loads no other files.

    Args:
        trace: the trace.
        charts: curves to show above the timeline, by name.
    """
    summary = summarize(trace)
    when = datetime.datetime.fromtimestamp(trace.began / 1e9).astimezone()
    data, labels = _timeline(trace)
    return Template(_asset("page.html")).substitute(
        title=html.escape(trace.title or "Trace"),
        subtitle=html.escape(f"{when:%Y-%m-%d %H:%M:%S %Z}, driver {trace.host}, process {trace.pid}"),
        css=_asset("page.css"),
        tiles=_tiles(trace),
        notes="".join(f"<p>{html.escape(note)}</p>" for note in summary.notes),
        charts="".join(line_chart(name, {"": list(values)}) for name, values in (charts or {}).items()),
        legend=_legend(data),
        labels=labels,
        counters="".join(_counter_charts(trace)),
        summary=replace(summary, title=_CALLS, notes=()).to_html() if summary.rows else "",
        data=json.dumps(data, separators=(",", ":"), default=str).replace("<", "\\u003c"),
        script=_asset("page.js"),
    )


def _asset(name: str) -> str:
    return (files("phalanx.tracing") / "page" / name).read_text(encoding="utf-8")


def _tiles(trace: Trace) -> str:
    calls = [call for call in trace.calls if call.method != STARTING]
    failed, seconds = sum(call.failed for call in calls), (trace.ended - trace.began) / 1e9
    tiles = {
        "traced": f"{int(seconds) // 60} min {int(seconds) % 60} s" if seconds >= 120 else f"{seconds:.3g} s",
        "calls": f"{len(calls):,}",
        "failed": f"{failed:,}",
        "ranks": f"{len(trace.ranks):,}",
        "to ranks": size(sum(call.stored_bytes + call.message_bytes for call in calls)),
        "from ranks": size(sum(call.result_bytes for call in calls)),
    }
    if idle := idle_shares(trace):
        tiles["idle, mean of ranks"] = f"{sum(idle.values()) / len(idle):.0f} %"
    marks = {"failed": " bad"} if failed else {}
    return "".join(
        f'<div class="tile{marks.get(name, "")}"><b>{value}</b><span>{name}</span></div>'
        for name, value in tiles.items()
    )


def _timeline(trace: Trace) -> tuple[dict[str, Any], str]:
    """Return the data that the page's script draws, and the HTML labels of the rows.

    Names and errors are numbered. A slice is nine numbers: start, duration, lane, depth, name, kind, call, open, error.
    """
    drawn = drawn_tracks(trace)
    names: dict[str, int] = {}
    texts: dict[str, int] = {}
    least = _SHORT_NS if sum(len(track.slices) for track in drawn) > _MANY_SLICES else 0
    numbers = {call.id: number for number, call in enumerate(trace.calls)}

    def flat(one: Slice) -> tuple[int, ...]:
        name = names.setdefault(one.name, len(names))
        text = -1 if one.error is None else texts.setdefault(one.error, len(texts))
        call = -1 if one.call is None else numbers.get(one.call, -1)
        place = (one.start - trace.began, one.end - one.start, one.lane, one.depth)
        return (*place, name, _KINDS[one.kind], call, int(one.open), text)

    rows: list[dict[str, Any]] = []
    labels: list[str] = []
    top, striped, nested = 0, False, 6 if len(drawn) > 24 else 12
    for track in drawn:
        if not rows or rows[-1]["group"] != track.group:
            rows.append({"group": track.group, "top": top, "height": _HEADING, "heading": True})
            labels.append(f'<div class="group" style="top:{top + 5}px">{html.escape(track.group)}</div>')
            top, striped = top + _HEADING, True
        kept = [one for one in track.slices if one.kind != "phase" or one.end - one.start >= least]
        lane = _FIRST + nested * max((one.depth for one in kept), default=0) + _GAP
        height, striped = lane * (1 + max((one.lane for one in kept), default=0)), not striped
        label, where = html.escape(track.label), html.escape(track.place)
        labels.append(
            f'<div class="track" data-track="{label}" title="{label} {where}" style="top:{top + 1}px">{label} '
            f"<small>{where}</small></div>"
        )
        row = {"group": track.group, "label": track.label, "place": track.place}
        row |= {"driver": isinstance(track.key, str), "striped": striped}
        row |= {"top": top, "height": height, "lane": lane}
        row |= {"slices": [number for one in kept for number in flat(one)]}
        row |= {"facts": {str(number): one.attributes for number, one in enumerate(kept) if one.attributes}}
        rows.append(row)
        top += height
    called = [call.began - trace.began for call in trace.calls if call.method != STARTING]
    methods = dict.fromkeys(call.name for call in trace.calls if call.name in names)
    colors = {names[phase]: color for phase, color in _PHASES.items() if phase in names}
    colors |= dict(zip((names[method] for method in methods), itertools.cycle(_PALETTE), strict=False))
    page = {"length": trace.ended - trace.began, "first": max(0, min(called, default=0)), "nested": nested}
    page |= {"names": list(names), "methods": [names[method] for method in methods], "colors": colors}
    calls = [
        {"group": call.group, "name": call.name, "ranks": len(call.parts)}
        | {"sent": call.message_bytes, "stored": call.stored_bytes, "back": call.result_bytes}
        for call in trace.calls
    ]
    page |= {"texts": list(texts), "rows": rows, "total": top, "calls": calls}
    return page, "".join(labels)


def _legend(data: dict[str, Any]) -> str:
    """Return the legend: the colors of methods, as buttons that fade them, and of phases."""
    parts: list[str] = []
    for number in [*data["methods"], *(number for number in data["colors"] if number not in data["methods"])]:
        name, box = html.escape(data["names"][number]), f'<i style="background:{data["colors"][number]}"></i>'
        button = f'<button data-name="{number}" title="show or fade {name}">{box}{name}</button>'
        parts.append(button if number in data["methods"] else f"<span>{box}{name}</span>")
    return "".join(parts)


def _counter_charts(trace: Trace) -> Iterator[str]:
    """Yield a chart for each series of the trace's counters, with a line per rank that counts it."""
    seconds = (trace.ended - trace.began) / 1e9
    charts: dict[str, dict[str, list[float]]] = {}
    for counter in trace.counters:
        of_rank = _RANK_COUNTER.match(counter.name)
        name, label = (of_rank[1], f"rank {of_rank[2]}") if of_rank else (counter.name, "")
        for series, values in counter.values.items():
            curve = resampled(counter.at, values, trace.began, trace.ended, _POINTS)
            charts.setdefault(f"{name}: {series}, over {seconds:.3g} s", {})[label] = curve
    for title, lines in charts.items():
        yield line_chart(title, lines, seconds)


def resampled(at: Sequence[int], values: Sequence[float], began: int, ended: int, count: int) -> list[float]:
    """Return the values at ``count`` evenly spaced times; 0 before the first value."""
    times = [began + (ended - began) * index // max(1, count - 1) for index in range(count)]
    places = [bisect_right(at, time) - 1 for time in times]
    return [0.0 if place < 0 else values[place] for place in places]


def line_chart(title: str, lines: Mapping[str, Sequence[float]], seconds: float | None = None) -> str:
    """Return a line chart as HTML with SVG.

    Args:
        title: title of the chart.
        lines: evenly spaced values, by label. A single line without a label is drawn with its running mean.
        seconds: length of the horizontal axis; None: the values are numbered from 1.
    """
    heading = f'<div class="chart"><h2>{html.escape(title)}</h2>'
    known = [value for values in lines.values() for value in values if -_MOST < value < _MOST]
    if not known:
        return f'{heading}<p class="soft">no values</p></div>'
    low, high = min([*known, 0.0]), max([*known, 0.0])
    marks = _marks(low, high if high - low > 1 / _MOST else low + 1.0, 4)
    left = max(46, 12 + _DIGIT_WIDTH * max(len(_label(mark)) for mark in marks))
    last = max(1, max(len(values) for values in lines.values()) - 1)

    def x(index: float) -> float:
        return left + (_WIDTH - left - _RIGHT) * index / last

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (marks[-1] - value) / (marks[-1] - marks[0])

    def polyline(values: Sequence[float], kind: str = "", color: str = "", label: str = "") -> str:
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(values) if -_MOST < v < _MOST)
        style, name = color and f' style="stroke:{color}"', label and f"<title>{label}</title>"
        return f'<polyline class="{kind}"{style} points="{points}">{name}</polyline>'

    parts = [heading, f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">']
    for mark in marks:
        at = f"{y(mark):.1f}"
        parts.append(f'<line class="grid" x1="{left}" x2="{_WIDTH - _RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{left - 6}" y="{y(mark) + 4:.1f}" text-anchor="end">{_label(mark)}</text>')
    if seconds:
        ticks = [(last * at / seconds, _label(at)) for at in _marks(0.0, seconds, 5) if at <= seconds]
    else:
        ticks = [(place, str(place + 1)) for place in sorted({round(last * tick / 5) for tick in range(6)})]
    for place, label in ticks:
        anchor = "end" if place > 0.97 * last else "middle"
        parts.append(f'<text x="{x(place):.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{label}</text>')
    if list(lines) == [""]:
        return "".join([*parts, polyline(lines[""], "each"), polyline(_means(lines[""])), "</svg></div>"])
    keys: list[str] = []
    for (label, values), color in zip(lines.items(), itertools.cycle(_PALETTE), strict=False):
        parts.append(polyline(values, "", color, label))
        keys.append(f'<span><i style="background:{color}"></i>{label}</span>')
    return "".join([*parts, f'</svg><div class="keys">{"".join(keys)}</div></div>'])


def _means(values: Sequence[float]) -> list[float]:
    """Return the running means of values."""
    window = max(1, len(values) // 30)
    spans = (values[max(0, i - window + 1) : i + 1] for i in range(len(values)))
    return [sum(span) / len(span) for span in spans]


def _marks(low: float, high: float, parts: int) -> list[float]:
    """Return about ``parts`` evenly spaced round numbers, from at most ``low`` to at least ``high``."""
    rough = (high - low) / parts
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [step * place for place in range(math.floor(low / step), math.ceil(high / step - 1e-9) + 1)]


def _label(value: float) -> str:
    """Return the label of a number on an axis: 0.25, 7.5, 12,500."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
