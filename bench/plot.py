"""The scaling plot: time over ranks and time over bytes, from the rows of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from bench.scenarios import BARE, FLOOR, PHALANX, VERL, VERL_NUMPY
from bench.stats import Case, Row, Summary

COLOURS = {PHALANX: "#0b6e4f", VERL: "#c0392b", VERL_NUMPY: "#e59866", BARE: "#2e86c1", FLOOR: "#7f8c8d"}
Points = list[tuple[int, Summary]]


def curves(rows: Iterable[Row], wanted: Callable[[Case], int | None]) -> dict[str, Points]:
    """Return, per contender, the (x, summary) of every row for which `wanted` returns an x, by x."""
    found: dict[str, Points] = {}
    for row in rows:
        x = wanted(row.case)
        if x is None:
            continue
        for contender, summary in row.summaries.items():
            found.setdefault(contender, []).append((x, summary))
    return {name: sorted(points, key=lambda point: point[0]) for name, points in found.items()}


def panels(rows: list[Row]) -> list[tuple[str, str, dict[str, Points]]]:
    """Return (title, x label, curves) of the panels that have points."""
    ranks = min((row.case.ranks for row in rows if row.case.scenario == "broadcast"), default=0)

    def over_bytes(scenario: str) -> Callable[[Case], int | None]:
        return lambda case: case.megabytes if (case.scenario, case.ranks) == (scenario, ranks) else None

    def over_ranks(scenario: str) -> Callable[[Case], int | None]:
        return lambda case: case.ranks if case.scenario == scenario else None

    made = [
        ("empty call", "ranks", curves(rows, over_ranks("empty_call"))),
        ("planning a call", "ranks", _planning(rows)),
        (f"broadcast to {ranks} ranks", "MB", curves(rows, over_bytes("broadcast"))),
        (f"split over {ranks} ranks and gather", "MB", curves(rows, over_bytes("split_gather"))),
    ]
    return [panel for panel in made if panel[2]]


def _planning(rows: list[Row]) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for row in rows:
        if row.case.scenario == "planning" and PHALANX in row.summaries:
            found.setdefault(row.case.variant, []).append((row.case.ranks, row.summaries[PHALANX]))
    return found


def draw(rows: list[Row], path: Path) -> bool:
    """Write the plot as PNG. Return False if no panel has points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made = panels(rows)
    if not made:
        return False
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), constrained_layout=True)
    for axis in axes.flat[len(made) :]:
        axis.set_visible(False)
    for axis, (title, unit, found) in zip(axes.flat, made, strict=False):
        for name, points in found.items():
            xs = [x for x, _ in points]
            medians = [summary.median for _, summary in points]
            axis.plot(xs, medians, marker="o", label=name, color=COLOURS.get(name))
            lows, highs = [s.q1 for _, s in points], [s.q3 for _, s in points]
            axis.fill_between(xs, lows, highs, alpha=0.15, color=COLOURS.get(name))
        axis.set(title=title, xlabel=unit, ylabel="seconds", xscale="log", yscale="log")
        ticks = sorted({x for points in found.values() for x, _ in points})
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3, which="major")
        axis.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True
