"""The HTML report of a trace: one self-contained page with headline figures, charts and a timeline."""

from __future__ import annotations

import datetime
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from phalanx.display.byte_format import size
from phalanx.display.tables import Table
from phalanx.tracing.charts import counter_charts, user_charts
from phalanx.tracing.events import STARTING, Call, Trace
from phalanx.tracing.slices import Slice, driver_slices, rank_slices
from phalanx.tracing.summary import Summary, summarize

_KINDS = {"call": 0, "phase": 1, "span": 2}
_MANY_SLICES = 150_000
_SHORT_NS = 100_000


def to_html(trace: Trace, charts: Mapping[str, Sequence[float]] | None = None) -> Iterator[str]:
    """Return the text of the page, in pieces. The page loads nothing from elsewhere.

    Args:
        trace: the trace.
        charts: curves to show above the timeline, by name.
    """
    summary = summarize(trace)
    title = html.escape(trace.title or "Trace")
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    yield f'<title>{title}</title>\n<link rel="icon" href="data:,">\n'
    yield f"<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n<main>\n"
    yield _header(trace, title)
    yield _tiles(trace, summary)
    if summary.notes:
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in summary.notes)
        yield f'<div class="card notes">{notes}</div>\n'
    curves = "".join(user_charts(charts or {}))
    if curves:
        yield f'<section class="card charts">{curves}</section>\n'
    yield _TIMELINE
    counted = "".join(counter_charts(trace))
    if counted:
        yield f'<section class="card charts many">{counted}</section>\n'
    if summary.table.rows:
        heading = f"<h2>{html.escape(summary.table.title)}</h2>"
        yield f'<section class="card">{heading}<div class="wide">{_table(summary.table)}</div></section>\n'
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


def _tiles(trace: Trace, summary: Summary) -> str:
    calls = [call for call in trace.calls if call.method != STARTING]
    failed = sum(call.error is not None for call in calls)
    sent = sum(call.stored_bytes + sum(part.message_bytes for part in call.parts) for call in calls)
    returned = sum(part.result_bytes for call in calls for part in call.parts)
    tiles = [
        (_seconds(trace.ended - trace.began), "traced"),
        (f"{len(calls):,}", "calls"),
        (f"{failed:,}", "failed"),
        (f"{len(trace.tracks):,}", "ranks"),
        (size(sent), "to ranks"),
        (size(returned), "from ranks"),
    ]
    if summary.idle:
        mean = sum(summary.idle.values()) / len(summary.idle)
        tiles.append((f"{mean:.0f} %", "idle, mean of ranks"))
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile{" bad" if name == "failed" and failed else ""}"><b>{html.escape(value)}</b>'
            f"<span>{html.escape(name)}</span></div>"
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
        all(row[i] is None or isinstance(row[i], int | float) for row in table.rows)
        for i in range(len(table.columns))
    ]
    kinds = ["number" if is_number else "text" for is_number in numeric]
    head = "".join(f'<th class="{kind}">{name}</th>' for name, kind in zip(table.columns, kinds, strict=True))
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{kind}">{_cell(name, value)}</td>'
            for name, value, kind in zip(table.columns, row, kinds, strict=True)
        )
        + "</tr>"
        for row in table.rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int | float):
        return size(int(value)) if "bytes" in column else _number(value)
    return html.escape(", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value))


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
    called = (call.began - trace.began for call in trace.calls if call.method != STARTING)
    return {
        "length": trace.ended - trace.began,
        "first": max(0, min(called, default=0)),
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
