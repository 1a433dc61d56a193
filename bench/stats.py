"""Medians with spread and ratios from measured repetitions. Pure: no clock, no process, no file."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Case:
    """A measured scenario with its sizes.

    megabytes counts MiB of payload, kilobytes KiB (the threshold scenario). `variant` distinguishes ways.
    """

    scenario: str
    ranks: int = 0
    megabytes: int = 0
    kilobytes: int = 0
    variant: str = ""

    def label(self) -> str:
        """Return the text for a table row, such as `broadcast, 4 ranks, 256 MB`."""
        parts = [self.scenario.replace("_", " ")]
        if self.variant:
            parts.append(self.variant)
        if self.ranks:
            parts.append(f"{self.ranks} rank" + ("s" if self.ranks > 1 else ""))
        if self.megabytes:
            parts.append(f"{self.megabytes} MB")
        if self.kilobytes:
            parts.append(f"{self.kilobytes} KB")
        return ", ".join(parts)


@dataclass(frozen=True)
class Sample:
    """A timed repetition, in seconds."""

    case: Case
    contender: str
    seconds: float


@dataclass(frozen=True)
class Summary:
    """Repetitions of a contender at a case, in seconds; quartiles by numpy's linear rule."""

    median: float
    low: float
    q1: float
    q3: float
    high: float
    count: int


def summarise(seconds: Sequence[float]) -> Summary:
    """Return median, extremes and quartiles.

    Raises:
        ValueError: if there are no values.
    """
    if not seconds:
        raise ValueError("summarise() was given no values; at least one repetition is needed")
    ordered = sorted(seconds)
    return Summary(
        median=statistics.median(ordered),
        low=ordered[0],
        q1=_quantile(ordered, 0.25),
        q3=_quantile(ordered, 0.75),
        high=ordered[-1],
        count=len(ordered),
    )


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    place = fraction * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True)
class Goal:
    """A bound on a ratio of medians: `ours / theirs` is at most `limit` (1/8 for "eight times faster")."""

    against: str
    limit: float

    def words(self) -> str:
        if self.limit < 1:
            return f">= {1 / self.limit:.3g}x faster than {self.against}"
        return f"<= {self.limit:.3g}x {self.against}"


@dataclass(frozen=True)
class Row:
    """A case over all contenders. `met` is None if a goal's contender was not measured."""

    case: Case
    summaries: Mapping[str, Summary]
    goals: tuple[tuple[Goal, bool | None], ...] = ()

    def ratio(self, contender: str, ours: str = "phalanx") -> float | None:
        """Return the contender's median over ours: above 1, ours is faster. None if either is missing."""
        if contender not in self.summaries or ours not in self.summaries:
            return None
        return self.summaries[contender].median / self.summaries[ours].median


def rows_of(samples: Iterable[Sample], goals: Mapping[Case, Sequence[Goal]]) -> list[Row]:
    """Return a row per case, in the order of the first samples."""
    grouped: dict[Case, dict[str, list[float]]] = {}
    for sample in samples:
        grouped.setdefault(sample.case, {}).setdefault(sample.contender, []).append(sample.seconds)
    rows: list[Row] = []
    for case, by_contender in grouped.items():
        summaries = {name: summarise(values) for name, values in by_contender.items()}
        judged = tuple((goal, judge(goal, summaries)) for goal in goals.get(case, ()))
        rows.append(Row(case, summaries, judged))
    return rows


def judge(goal: Goal, summaries: Mapping[str, Summary], ours: str = "phalanx") -> bool | None:
    """Return whether the goal is met; None if either contender was not measured."""
    if ours not in summaries or goal.against not in summaries:
        return None
    return summaries[ours].median <= goal.limit * summaries[goal.against].median


def as_json(row: Row) -> dict[str, Any]:
    """Return the row as plain values for the results file."""
    return {
        "case": asdict(row.case),
        "label": row.case.label(),
        "seconds": {name: asdict(summary) for name, summary in row.summaries.items()},
        "ratio_to_phalanx": {name: row.ratio(name) for name in row.summaries if name != "phalanx"},
        "goals": [{"goal": goal.words(), "met": met} for goal, met in row.goals],
    }
