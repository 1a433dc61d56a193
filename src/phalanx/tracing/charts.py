"""Line charts of a report, as SVG."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from phalanx.tracing.counters import resampled
from phalanx.tracing.events import Trace

_WIDTH, _HEIGHT, _TOP, _BOTTOM, _RIGHT = 640, 220, 10, 26, 8
_DIGIT_WIDTH = 8  # of a digit of the largest font of labels
_POINTS = 320
_OF_RANK = re.compile(r"^(.*) rank (\d+)$")


def user_charts(charts: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """Return a chart of each of the user's curves: the values faint, their running mean strong."""
    for name, values in charts.items():
        yield line_chart(name, {"": list(values)})


def counter_charts(trace: Trace) -> Iterator[str]:
    """Return one chart for each series of the trace's counters, with a line per rank that counts it."""
    seconds = (trace.ended - trace.began) / 1e9
    lines: dict[str, dict[str, list[float]]] = {}
    for counter in trace.counters:
        of_rank = _OF_RANK.match(counter.name)
        name, label = (of_rank[1], f"rank {of_rank[2]}") if of_rank else (counter.name, "")
        for series, values in counter.values.items():
            curve = resampled(counter, values, trace.began, trace.ended, _POINTS)
            lines.setdefault(f"{name}: {series}, over {seconds:.3g} s", {})[label] = curve
    for title, found in lines.items():
        yield line_chart(title, found, seconds)


def line_chart(title: str, lines: Mapping[str, Sequence[float]], seconds: float | None = None) -> str:
    """Return a chart of one or more lines.

    Args:
        title: of the chart.
        lines: values at equal distances, by label. A single line without a label is drawn with its running mean.
        seconds: length of the horizontal axis; None: the values are numbered from 1.
    """
    heading = f'<div class="chart"><h2>{html.escape(title)}</h2>'
    known = [value for values in lines.values() for value in values if math.isfinite(value)]
    if not known:
        return f'{heading}<p class="soft">no values</p></div>'
    area = _Area(known, max(len(values) for values in lines.values()))
    parts = [
        heading,
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        *area.grid(),
        *area.below(seconds),
    ]
    if list(lines) == [""]:
        values = list(lines[""])
        parts.append(f'<polyline class="each" points="{area.points(values)}"/>')
        parts.append(f'<polyline class="mean" points="{area.points(_running_means(values))}"/></svg>')
    else:
        for number, (label, values) in enumerate(lines.items()):
            parts.append(
                f'<polyline class="line{number % 8}" points="{area.points(values)}"><title>{label}</title></polyline>'
            )
        parts.append("</svg>")
        names = (f'<span class="key{number % 8}">{label}</span>' for number, label in enumerate(lines))
        parts.append(f'<div class="keys">{"".join(names)}</div>')
    return "".join([*parts, "</div>"])


class _Area:
    """The drawing area of a chart: its scales and labels."""

    def __init__(self, values: Sequence[float], count: int) -> None:
        low, high = min([*values, 0.0]), max(values)
        self.marks = _marks(low, high if high > low else low + 1.0, 4)
        self.left = max(46, 12 + _DIGIT_WIDTH * max(len(_mark(mark)) for mark in self.marks))
        self.last = max(1, count - 1)

    def x(self, index: float) -> float:
        """Return the horizontal place of a value by its index."""
        return self.left + (_WIDTH - self.left - _RIGHT) * index / self.last

    def y(self, value: float) -> float:
        """Return the vertical place of a value."""
        low, high = self.marks[0], self.marks[-1]
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - value) / (high - low)

    def points(self, values: Sequence[float]) -> str:
        """Return the points of a line; values that are not finite are left out."""
        return " ".join(f"{self.x(i):.1f},{self.y(v):.1f}" for i, v in enumerate(values) if math.isfinite(v))

    def grid(self) -> Iterator[str]:
        """Return the horizontal lines with their labels."""
        for mark in self.marks:
            y = self.y(mark)
            yield f'<line class="grid" x1="{self.left}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield f'<text x="{self.left - 6}" y="{y + 4:.1f}" text-anchor="end">{_mark(mark)}</text>'

    def below(self, seconds: float | None) -> Iterator[str]:
        """Return the labels of the horizontal axis: seconds, or numbers of values."""
        if seconds:
            ticks = [(self.last * at / seconds, _mark(at)) for at in _marks(0.0, seconds, 5) if at <= seconds]
        else:
            ticks = [(place, str(place + 1)) for place in (round(self.last * tick / 5) for tick in range(6))]
        for place, label in ticks:
            anchor = "end" if place > 0.97 * self.last else "middle"
            yield f'<text x="{self.x(place):.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{label}</text>'


def _running_means(values: Sequence[float]) -> list[float]:
    window = max(1, len(values) // 30)
    spans = (values[max(0, i - window + 1) : i + 1] for i in range(len(values)))
    return [sum(span) / len(span) for span in spans]


def _marks(low: float, high: float, parts: int) -> list[float]:
    """Return round numbers at even distances, about ``parts`` of them, from at most ``low`` to at least ``high``."""
    rough = (high - low) / parts
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [step * place for place in range(math.floor(low / step), math.ceil(high / step - 1e-9) + 1)]


def _mark(value: float) -> str:
    """Return the label of a number at an axis: 0.25, 7.5, 12,500."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
