"""What the arguments of a call would fetch from the outputs of other calls, as far as that is known by now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from phalanx.dispatch.plan import CallPlan, Each, FuturePiece
from phalanx.dispatch.shardable import Replicate
from phalanx.dispatch.split import even_sizes, piece_bounds
from phalanx.dispatch.structure import node_of
from phalanx.runtime.calls.future import CallFuture
from phalanx.runtime.calls.values import Readonly, StoredValue
from phalanx.transport.base import FetchFailed, NotReady, Ticket, Transport
from phalanx.wire.messages import PartInfo

_Found = tuple[int | None, tuple[str, ...]]
_MARKERS = (FuturePiece, StoredValue, Readonly)


def futures_in(value: Any, kinds: type | tuple[type, ...]) -> Iterator[Any]:
    """The objects of some kinds in a value, found in tuples, dicts and dataclasses as planning finds them."""
    if isinstance(value, kinds):
        yield value
        return
    node = None if isinstance(value, _MARKERS) else node_of(value)
    if node is not None:
        for child in node.values:
            yield from futures_in(child, kinds)


def described(value: Any) -> str:
    """What a value is, in a few words: "tensor float32 [8, 4]", "dict of 2"."""
    if isinstance(value, Replicate | Readonly):
        return described(value.value)
    if isinstance(value, CallFuture):
        return f"future of {value.group}.{value.call.method}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    name = type(value).__name__
    if shape is not None and dtype is not None:
        return f"{name} {str(dtype).removeprefix('torch.')} {list(shape)}"
    if isinstance(value, bool | int | float | str | bytes | None):
        text = repr(value)
        return text if len(text) <= 30 else f"{name} of length {len(value)}"  # type: ignore[arg-type]
    return f"{name} of {len(value)}" if isinstance(value, list | tuple | dict | set) else name


class Incoming:
    """Looks at the futures of one call. Of each, what its ranks have told of their outputs is read once."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._infos: dict[int, tuple[CallFuture[Any], list[PartInfo] | None]] = {}
        self._pieces: dict[tuple[int, int, int], _Found] = {}

    def of(self, values: Iterable[Any], *, once: bool = False) -> _Found:
        """Bytes that a rank with these arguments fetches (None: not known yet), and from where.

        ``once`` counts the bytes of each future, rather than what is fetched of it.
        """
        total: int | None = 0
        sources: dict[str, None] = {}
        met: set[int] = set()
        for found in (f for value in values for f in futures_in(value, (CallFuture, FuturePiece))):
            future = found.future if isinstance(found, FuturePiece) else found
            if once and id(future) in met:
                continue
            met.add(id(future))
            split = isinstance(found, FuturePiece) and not once
            nbytes, names = self._piece(found) if split else self._whole(future)
            total = None if total is None or nbytes is None else total + nbytes
            sources |= dict.fromkeys(names)
        return total, tuple(sources)

    def sizes(self, plan: CallPlan) -> list[int] | None:
        """Rows of each piece where only futures have rows; None where their number is not known yet."""
        columns = [a for a in (*plan.args, *plan.kwargs.values()) if isinstance(a, Each)]
        pieces = (p for column in columns for value in column.values for p in futures_in(value, FuturePiece))
        first = next(pieces, None)
        infos = None if first is None else self._known(first.future)
        if first is None or infos is None or any(info.rows is None for info in infos):
            return None
        return even_sizes(sum(info.rows or 0 for info in infos), first.count)

    def _whole(self, future: CallFuture[Any]) -> _Found:
        tickets = future.parts(self._transport)
        if tickets is None:
            return None, ()
        infos = self._infos_of(future, tickets)
        nbytes = None if infos is None else sum(info.nbytes for info in infos)
        return nbytes, tuple(f"{future.group}[{rank}]" for rank in future.call.plan.ranks)

    def _piece(self, piece: FuturePiece) -> _Found:
        key = (id(piece.future), piece.index, piece.count)
        if key not in self._pieces:
            self._pieces[key] = self._rows_of(piece)
        return self._pieces[key]

    def _rows_of(self, piece: FuturePiece) -> _Found:
        future: CallFuture[Any] = piece.future
        infos = self._known(future)
        if future.row_parts(self._transport) is None:
            return None, ()
        take = future.call.plan.gather.take
        names = [f"{future.group}[{future.call.plan.ranks[position]}]" for position in take]
        if infos is None or any(info.rows is None for info in infos):
            return None, tuple(names)
        start, stop = piece_bounds(sum(info.rows or 0 for info in infos), piece.count, piece.index)
        total, offset = 0, 0
        sources: list[str] = []
        halved = any(ticket.rest is not None for ticket in future.parts(self._transport) or ())
        for name, info in zip(names, infos, strict=True):
            fetched = _overlapping(info, start - offset, stop - offset, halved)
            offset += info.rows or 0
            total += fetched
            sources += [name] if fetched else []
        return total, tuple(sources)

    def _known(self, future: CallFuture[Any]) -> list[PartInfo] | None:
        tickets = future.row_parts(self._transport)
        return None if tickets is None else self._infos_of(future, tickets)

    def _infos_of(self, future: CallFuture[Any], tickets: Sequence[Ticket]) -> list[PartInfo] | None:
        if id(future) not in self._infos:
            self._infos[id(future)] = (future, self._ask(tickets))
        return self._infos[id(future)][1]

    def _ask(self, tickets: Sequence[Ticket]) -> list[PartInfo] | None:
        """What the ranks told of their outputs, if all have by now: it does not wait, and fetches no output."""
        refs = [ticket.info for ticket in tickets if ticket.info is not None]
        if len(refs) < len(tickets) or self._transport.wait(refs, len(refs), 0)[1]:
            return None
        try:
            return self._transport.fetch(refs, 1.0)
        except (FetchFailed, NotReady):
            return None


def _overlapping(info: PartInfo, start: int, stop: int, halved: bool) -> int:
    """Bytes that are fetched of a part for its rows of [start, stop): of whole halves, else of just these rows."""
    rows = info.rows or 0
    if not halved:
        return info.nbytes * max(0, min(stop, rows) - max(start, 0)) // max(1, rows)
    first = rows if info.first_rows is None else info.first_rows
    total = 0
    for begin, end in ((0, first), (first, rows)):
        if max(start, begin) < min(stop, end):
            total += info.nbytes * (end - begin) // rows
    return total
