"""The description of a call before it is made: arguments, rows of each rank, and the result."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.display.byte_format import size
from phalanx.display.tables import Table

_SHOWN_RANKS = 32


@dataclass(frozen=True)
class ArgumentFacts:
    """One argument of a call.

    Attributes:
        name: of the parameter.
        value: what it is, such as "tensor float32 [8, 4]".
        given: how the ranks get it: "the same to all", "rows split", "one element each" and so on.
        travels: "in the message", "stored once", "stored, once per piece", "by reference" and so on.
        nbytes: of the complete value; None if it is the result of another call.
    """

    name: str
    value: str
    given: str
    travels: str
    nbytes: int | None


@dataclass(frozen=True)
class RankFacts:
    """What one rank gets, and what becomes of its output.

    Attributes:
        rank, host: who and where.
        place: its coordinates where the call goes over a mesh.
        start, stop: the rows of the caller that it gets, ``stop`` not included; None where no rows are split, or
            where they are not consecutive.
        rows: their number; None if nothing is split, or if it depends on the result of another call.
        given_rows: rows that reach the method, padding included.
        order: the caller's rows in order, where they are not consecutive.
        returns: "kept" or "dropped".
    """

    rank: int
    host: str
    place: dict[str, int] | None
    start: int | None
    stop: int | None
    rows: int | None
    given_rows: int | None
    order: tuple[int, ...] | None
    returns: str


@dataclass(frozen=True)
class CallExplanation:
    """What a call would do. ``str()`` is for terminals, a notebook shows HTML, ``to_dict()`` is for programs."""

    call: str
    mode: str
    waits: bool
    arguments: tuple[ArgumentFacts, ...]
    ranks: tuple[RankFacts, ...]
    collected: str
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data; every rank, whatever their number."""
        return asdict(self)

    @property
    def title(self) -> str:
        """The call in one line."""
        ranks = f"{len(self.ranks)} rank{'' if len(self.ranks) == 1 else 's'}"
        end = "waits for the result" if self.waits else "returns a CallFuture"
        return f"{self.call} by {self.mode} on {ranks}; {end}. Nothing was sent"

    def tables(self) -> tuple[Table, ...]:
        """Tables of the arguments, if there are any, and of the first ranks."""
        arguments = (self._arguments(),) if self.arguments else ()
        return *arguments, self._ranks()

    def _arguments(self) -> Table:
        rows = [(a.name, a.value, a.given, a.travels, size(a.nbytes)) for a in self.arguments]
        columns = ("argument", "value", "given to ranks", "travels", "size")
        return Table("Arguments", columns, tuple(rows))

    def _ranks(self) -> Table:
        shown = self.ranks[:_SHOWN_RANKS]
        columns: list[tuple[str, list[Any]]] = [("rank", [r.rank for r in shown])]
        if any(r.host for r in shown):
            columns.append(("host", [r.host for r in shown]))
        if any(r.place for r in shown):
            columns.append(("mesh", [_place(r.place) for r in shown]))
        if any(r.rows is not None for r in self.ranks):
            columns.append(("rows", [_rows(r) for r in shown]))
        columns.append(("output", [r.returns for r in shown]))
        rows = tuple(zip(*(cells for _, cells in columns), strict=True))
        more = len(self.ranks) - len(shown)
        notes = (f"and {more} more ranks; .to_dict() has all of them.",) if more else ()
        return Table("Ranks", tuple(name for name, _ in columns), rows, notes)

    def _closing_lines(self) -> tuple[str, ...]:
        return f"Result: {self.collected}.", *self.notes

    def __str__(self) -> str:
        return "\n".join([self.title, *map(str, self.tables()), *self._closing_lines()])

    def __rich__(self) -> Any:
        from rich.console import Group  # only where something is shown
        from rich.text import Text

        return Group(Text(self.title), *self.tables(), *map(Text, self._closing_lines()))

    def _repr_html_(self) -> str:
        parts = [table._repr_html_() for table in self.tables()]  # pyright: ignore[reportPrivateUsage]
        closing = "".join(f"<p>{html.escape(line)}</p>" for line in self._closing_lines())
        return f"<p>{html.escape(self.title)}</p>{''.join(parts)}{closing}"


def _place(place: dict[str, int] | None) -> str | None:
    return ", ".join(f"{axis}={at}" for axis, at in place.items()) if place else None


def _rows(rank: RankFacts) -> str | None:
    if rank.rows is None:
        return None
    if rank.order is not None:
        text = _listed(rank.order)
    elif rank.start is None:
        text = f"{rank.rows}"
    else:
        text = f"{rank.start}:{rank.stop}"
    padded = rank.given_rows is not None and rank.given_rows != rank.rows
    return f"{text} (padded to {rank.given_rows})" if padded else text


def _listed(rows: Sequence[int]) -> str:
    shown = ", ".join(map(str, rows[:6]))
    return f"{shown}, ... ({len(rows)} rows)" if len(rows) > 6 else shown
