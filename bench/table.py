"""Rows as a table: for the terminal (rich) and for docs/performance.md (Markdown)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table

from bench.accounts import Account
from bench.scenarios import (
    ALL_BYTES,
    BARE,
    FLOOR,
    PHALANX,
    UNSAVED,
    UNTRACED,
    UNVERIFIED,
    VERL,
    VERL_NUMPY,
)
from bench.stats import Row, Summary

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
RATIOS = (VERL, VERL_NUMPY, BARE, FLOOR, UNTRACED, UNSAVED, UNVERIFIED, ALL_BYTES)
CONTENDERS = (PHALANX, *RATIOS)
MISSING = "-"


def duration(seconds: float) -> str:
    """Return three digits with a fitting unit: `4.12 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def with_spread(summary: Summary | None) -> str:
    """Return the median, and the lowest and the quartiles in brackets: `4.12 ms (3.9; 4-4.3)` in the median's unit."""
    if summary is None:
        return MISSING
    median = duration(summary.median)
    scale = {"s": 1.0, "ms": 1e3, "us": 1e6}[median.split()[1]]
    low, q1, q3 = (f"{value * scale:.3g}" for value in (summary.low, summary.q1, summary.q3))
    return f"{median} ({low}; {q1}-{q3})"


def ratio(value: float | None) -> str:
    """Return `3.2x`, or a dash."""
    return MISSING if value is None else f"{value:.3g}x"


def verdict(row: Row) -> str:
    """Return the row's goals, each with yes, no, or not measured."""
    words = {True: "yes", False: "no", None: "not measured"}
    return "; ".join(f"{goal.words()}: {words[met]}" for goal, met in row.goals)


def cells(row: Row) -> list[str]:
    """Return a table row: label, medians by contender, ratios to phalanx, goals."""
    medians = [with_spread(row.summaries.get(name)) for name in CONTENDERS]
    return [row.case.label(), *medians, *(ratio(row.ratio(name)) for name in RATIOS), verdict(row)]


def headings() -> list[str]:
    return ["case", *CONTENDERS, *(f"{name} / phalanx" for name in RATIOS), "goal"]


def measured(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Return the table without empty columns."""
    kept = [at for at in range(len(columns)) if at == 0 or any(line[at] != MISSING for line in lines)]
    return [columns[at] for at in kept], [[line[at] for at in kept] for line in lines]


def page_tables(rows: Sequence[Row]) -> str:
    """Return a small table for each scenario of ours, with its smallest and largest cases."""
    ours = [row for row in rows if PHALANX in row.summaries]
    scenarios = dict.fromkeys(row.case.scenario for row in ours)
    return "\n\n".join(_page_table([row for row in ours if row.case.scenario == name]) for name in scenarios)


def _page_table(rows: Sequence[Row]) -> str:
    measured = [name for name in CONTENDERS if any(name in row.summaries for row in rows)]
    shown: list[Row] = []
    for variant in dict.fromkeys(row.case.variant for row in rows):
        sizes = sorted((row for row in rows if row.case.variant == variant), key=lambda row: row.case)
        shown += sizes if len(sizes) < 3 else [sizes[0], sizes[-1]]
    lines = [[_size(row), *(_with_ratio(row, name) for name in measured)] for row in shown]
    return markdown_table([rows[0].case.scenario.replace("_", " "), *measured], lines)


def _size(row: Row) -> str:
    """Return the sizes of a case: `4 ranks, 256 MB`."""
    return row.case.label().partition(", ")[2]


def _with_ratio(row: Row, contender: str) -> str:
    """Return the median and its ratio to ours: `349 ms, 1.86x`."""
    summary, times = row.summaries.get(contender), row.ratio(contender)
    if summary is None:
        return MISSING
    return duration(summary.median) + (
        f", {ratio(times)}" if times is not None and contender != PHALANX else ""
    )


def megabytes(count: int | None) -> str:
    return MISSING if count is None else f"{count / (1 << 20):.1f}"


def account_headings() -> list[str]:
    return [
        "case",
        "contender",
        "driver MB",
        "workers MB",
        "store peak MB",
        "store made MB",
        "driver read bytes",
    ]


def account_cells(account: Account) -> list[str]:
    """Return peaks in MB above idle, and the exact bytes that the driver read."""
    read = MISSING if account.driver_fetched is None else f"{account.driver_fetched:,}"
    peaks = (account.driver_peak, account.workers_peak, account.store_peak, account.store_created)
    return [account.label, account.contender, *(megabytes(count) for count in peaks), read]


def rich_table(title: str, columns: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=False)
    for line in lines:
        table.add_row(*line)
    return table


def markdown_table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    made = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    made += ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join(made)


def replace_between_markers(text: str, inside: str) -> str:
    """Return the text with everything between the two markers replaced.

    Raises:
        ValueError: if a marker is missing.
    """
    before, found_begin, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found_begin or not found_end:
        raise ValueError(f"the page has no {BEGIN} ... {END}; put both lines where the table belongs")
    return f"{before}{BEGIN}\n{inside.strip()}\n{END}{after}"


def write_into_page(page: Path, inside: str) -> None:
    """Replace the text between the markers of the page."""
    page.write_text(replace_between_markers(page.read_text(), inside))
