"""The messages of a call, made as for sending it and stored nowhere: what they carry, and what ranks would fetch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.declare.spec import MethodSpec
from phalanx.dispatch.plan import CallPlan, FuturePiece, Same
from phalanx.dispatch.split import piece_bounds
from phalanx.dispatch.structure import node_of
from phalanx.runtime.calls.compose import Outlet, messages
from phalanx.runtime.calls.counts import Book
from phalanx.runtime.calls.future import CallFuture
from phalanx.runtime.calls.store import Room
from phalanx.runtime.calls.stored_rows import StoredParts
from phalanx.runtime.calls.values import Readonly, StoredValue
from phalanx.runtime.groups.selection import Selection
from phalanx.show.sizes import size
from phalanx.transport.base import Transport
from phalanx.transport.values import FetchFailed, NotReady, Ref, StoreSpace
from phalanx.wire.codec import Encoded, tokens_of
from phalanx.wire.messages import Message, Piece, RankCall, Whole
from phalanx.wire.outputs import DESCRIBED, OUTPUT, PartInfo
from phalanx.wire.value import Value

_A_NUMBER = 1 << 55  # as long as those of calls, so that messages are as long as theirs
_MARKERS = (FuturePiece, StoredValue, Readonly)


def leaves_of(value: Value, kinds: type | tuple[type, ...]) -> Iterator[Any]:
    """The objects of some kinds in a value, found in tuples, dicts and dataclasses as planning finds them."""
    if isinstance(value, kinds):
        yield value
        return
    node = None if isinstance(value, _MARKERS) else node_of(value)
    if node is not None:
        for child in node.values:
            yield from leaves_of(child, kinds)


@dataclass(frozen=True)
class Fetched:
    """What is fetched from outputs of other calls: bytes (None: not known yet), and from whom, as "group[rank]"."""

    nbytes: int | None = 0
    sources: tuple[str, ...] = ()

    def __add__(self, other: Fetched) -> Fetched:
        nbytes = None if self.nbytes is None or other.nbytes is None else self.nbytes + other.nbytes
        return Fetched(nbytes, tuple(dict.fromkeys((*self.sources, *other.sources))))


@dataclass(frozen=True)
class RankMessage:
    """The message of one rank, and what the rank reads from the object store and fetches from other ranks for it.

    ``future_rows`` are the rows of all pieces of futures in it, where only these have rows and tell of them.
    """

    nbytes: int = 0
    store_bytes: int = 0
    fetched: Fetched = Fetched()
    stored_body: bool = False
    future_rows: int | None = None


class DryRun:
    """A call of which the messages are made; ``outlet`` knows what would be stored.

    Raises:
        DispatchError: an argument cannot be pickled, or what is to be stored is larger than the object store.
    """

    def __init__(self, selection: Selection, spec: MethodSpec, plan: CallPlan, *, bare: bool) -> None:
        core = selection.core
        self._room = _LookedAt(core.transport)
        self.outputs = Outputs(core.transport)
        self.outlet = DryOutlet(
            core.transport, core.outlet.inline_bytes, Book(), self._room, outputs=self.outputs
        )
        self._put_before = _put_before(plan)
        returns = DESCRIBED if not spec.blocking and plan.gather.how == "rows" else OUTPUT
        header = RankCall(
            _A_NUMBER,
            core.epoch.number,
            selection.role,
            spec.name,
            True,
            returns,
            spec.readonly,
            spec.to_device,
            None,
        )
        made = () if bare else messages(self.outlet, plan, header)
        self.messages = [RankMessage()] * len(plan.ranks) if bare else [self._read(one) for one in made]

    def notes(self) -> Iterator[str]:
        """What the call would wait for."""
        if self._room.note:
            yield self._room.note
        for future in self.outlet.made_here:
            if not future.done():
                yield f"{future!r} comes through the driver, which would wait for it; its bytes are not counted"

    def _read(self, message: Message) -> RankMessage:
        """A message as its rank reads it."""
        data, refs = message
        body = RankCall.unpack(data).body
        tokens = tokens_of(body) if body is not None else refs[-1].tokens
        different = {id(ref): ref for ref in refs}.values()
        return RankMessage(
            nbytes=len(data),
            store_bytes=sum(map(self._read_bytes, different)),
            fetched=sum((self.outputs.fetched(token, refs) for token in tokens), Fetched()),
            stored_body=body is None,
            future_rows=next((self.outputs.rows(t, refs) for t in tokens if isinstance(t, Piece)), None),
        )

    def _read_bytes(self, ref: Value) -> int:
        return ref.nbytes if isinstance(ref, Encoded) else self._put_before.get(id(ref), 0)


def _put_before(plan: CallPlan) -> dict[int, int]:
    """Sizes of what px.put stored, by the id of its reference."""
    values = (
        value
        for argument in (*plan.args, *plan.kwargs.values())
        for value in ((argument.value,) if isinstance(argument, Same) else argument.values)
    )
    return {id(leaf.ref): leaf.nbytes for value in values for leaf in leaves_of(value, StoredValue)}


class _LookedAt(Room):
    """Refuses what a call refuses, and waits for nothing."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.note: str | None = None

    def _wait_for(self, nbytes: int, space: StoreSpace, what: str) -> None:
        if space.free < nbytes:
            self.note = (
                f"The object store of this node has {size(max(0, space.free))} free of "
                f"{size(space.capacity)}: the call would wait until others have ended"
            )


@dataclass(frozen=True)
class DryOutlet(Outlet):
    """Stores nothing, waits for nothing, and knows whose results are among the arguments."""

    outputs: Outputs = field(kw_only=True)
    sizes: list[int] = field(default_factory=list[int])
    made_here: list[CallFuture[Any]] = field(default_factory=list[CallFuture[Any]])

    def put(self, encoded: Encoded) -> Ref:
        self.sizes.append(encoded.nbytes)
        return encoded

    def passes(self, future: CallFuture[Any]) -> None:
        self.outputs.add(future)

    def value_of(self, future: CallFuture[Any] | StoredParts) -> Value:
        if isinstance(future, StoredParts):
            return None
        if not any(future is one for one in self.made_here):
            self.made_here.append(future)
        return future.result() if future.done() else None


class Outputs:
    """Outputs of other calls: whose they are, and what their ranks have told of them by now."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._of: dict[int, tuple[str, Any]] = {}  # id of reference -> whose, reference of its PartInfo
        self._told: dict[tuple[int, ...], list[PartInfo] | None] = {}

    def add(self, future: CallFuture[Any]) -> list[Ref]:
        """Know the outputs of a call; their references, none where only the driver can make its value."""
        tickets = future.parts(self._transport) or ()
        for rank, ticket in zip(future.ranks, tickets, strict=False):
            self._of[id(ticket.value)] = f"{future.group}[{rank}]", ticket.info
        return [ticket.value for ticket in tickets]

    def whole(self, future: CallFuture[Any]) -> Fetched:
        """All outputs of a call."""
        parts = self.add(future)
        return self._all(parts) if parts else Fetched(None)

    def fetched(self, token: Value, refs: Sequence[Ref]) -> Fetched:
        """What a rank fetches for one token of its message."""
        if isinstance(token, Whole):
            return self._all([refs[index] for index in token.parts])
        return self._rows_of(token, refs) if isinstance(token, Piece) else Fetched()

    def rows(self, piece: Piece, refs: Sequence[Ref]) -> int | None:
        """Rows of the result of which this is a piece; None where they are not known yet."""
        told = self._infos([refs[index] for index in piece.parts])
        return None if told is None else _total(told)

    def _all(self, parts: Sequence[Ref]) -> Fetched:
        told = self._infos(parts)
        return Fetched(None if told is None else sum(info.nbytes for info in told), self._names(parts))

    def _rows_of(self, piece: Piece, refs: Sequence[Ref]) -> Fetched:
        parts = [refs[index] for index in piece.parts]
        told, total = self._infos(parts), self.rows(piece, refs)
        if told is None or total is None:
            return Fetched(None, self._names(parts))
        start, stop = piece_bounds(total, piece.count, piece.index)
        everything, offset = Fetched(), 0
        for part, info in zip(parts, told, strict=True):
            nbytes = info.nbytes_of(start - offset, stop - offset)
            everything += Fetched(nbytes, self._names([part]) if nbytes else ())
            offset += info.rows or 0
        return everything

    def _names(self, parts: Sequence[Ref]) -> tuple[str, ...]:
        return tuple(self._of[id(part)][0] for part in parts)

    def _infos(self, parts: Sequence[Ref]) -> list[PartInfo] | None:
        """What the ranks told of these outputs, if all have by now: it does not wait, and fetches no output."""
        key = tuple(map(id, parts))
        if key not in self._told:
            refs = [self._of[part][1] for part in key]
            self._told[key] = None
            if None not in refs and not self._transport.wait(refs, len(refs), 0)[1]:
                with contextlib.suppress(FetchFailed, NotReady):
                    self._told[key] = self._transport.fetch(refs, 1.0)
        return self._told[key]


def _total(infos: Sequence[PartInfo]) -> int | None:
    known = [info.rows for info in infos if info.rows is not None]
    return sum(known) if len(known) == len(infos) else None
