"""What a call would do, as a value: which rank gets what, what travels on which hop, who returns."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.show.sizes import size
from phalanx.show.tables import Table

_SHOWN_RANKS = 32


@dataclass(frozen=True)
class ArgumentFacts:
    """One argument of a call.

    Attributes:
        name: of the parameter.
        value: what it is, such as "tensor float32 [8, 4]".
        given: how the ranks get it: "the same to all", "rows split", "one element each" and so on.
        travels: "in the message", "stored once", "stored, once per piece", "by reference" and so on.
        nbytes: of the whole value; None where it is not known yet (the result of another call).
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
        rows: how many these are; None where nothing is split, or where it is not known yet.
        given_rows: rows that reach the method, padding included.
        order: the caller's rows in order, where they are not consecutive.
        message_bytes: in the message from the driver.
        store_bytes: read from the object store, put there by the driver.
        peer_bytes: fetched from the outputs of other calls; None where that is not known yet.
        sources: the ranks whose outputs it fetches, as "group[rank]".
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
    message_bytes: int
    store_bytes: int
    peer_bytes: int | None
    sources: tuple[str, ...]
    returns: str


@dataclass(frozen=True)
class Hop:
    """Bytes between two places: in all, and the most for one rank (0: no rank has a part in it).

    None is "not known before the call".
    """

    name: str
    nbytes: int | None
    most: int | None
    what: str


@dataclass(frozen=True)
class CallExplanation:
    """What a call would do. ``str()`` is for terminals, a notebook shows HTML, ``to_dict()`` is for programs."""

    call: str
    mode: str
    waits: bool
    arguments: tuple[ArgumentFacts, ...]
    ranks: tuple[RankFacts, ...]
    hops: tuple[Hop, ...]
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
        """Arguments if there are any, ranks, hops. Of very many ranks the first are shown."""
        arguments = (self._arguments(),) if self.arguments else ()
        return *arguments, self._ranks(), self._hops()

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
        columns.append(("message", [size(r.message_bytes) for r in shown]))
        if any(r.store_bytes for r in self.ranks):
            columns.append(("from the store", [size(r.store_bytes) for r in shown]))
        if any(r.sources for r in self.ranks):
            columns.append(("from ranks", [_fetched(r) for r in shown]))
        columns.append(("output", [r.returns for r in shown]))
        rows = tuple(zip(*(cells for _, cells in columns), strict=True))
        more = len(self.ranks) - len(shown)
        notes = (f"and {more} more ranks; .to_dict() has all of them.",) if more else ()
        return Table("Ranks", tuple(name for name, _ in columns), rows, notes)

    def _hops(self) -> Table:
        hops = [hop for hop in self.hops if hop.nbytes != 0]
        rows = [
            (hop.name, size(hop.nbytes), size(hop.most) if hop.most != 0 else None, hop.what) for hop in hops
        ]
        columns = ("hop", "bytes in all", "most for one rank", "what")
        return Table("Bytes by hop", columns, tuple(rows), (f"Result: {self.collected}.", *self.notes))

    def __str__(self) -> str:
        return "\n".join([self.title, *map(str, self.tables())])

    def __rich__(self) -> Any:
        from rich.console import Group  # only where something is shown
        from rich.text import Text

        return Group(Text(self.title), *self.tables())

    def _repr_html_(self) -> str:
        parts = [table._repr_html_() for table in self.tables()]  # pyright: ignore[reportPrivateUsage]
        return f"<p>{html.escape(self.title)}</p>{''.join(parts)}"


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


def _fetched(rank: RankFacts) -> str | None:
    if not rank.sources:
        return None
    shown = ", ".join(rank.sources[:3]) + (
        f" and {len(rank.sources) - 3} more" if len(rank.sources) > 3 else ""
    )
    return f"{size(rank.peer_bytes)} of {shown}"
