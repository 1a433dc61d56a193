"""From a plan to the messages of a call: every distinct value is encoded once and, if large, stored once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from phalanx.dispatch.plan import CallPlan, Each, FuturePiece, Same
from phalanx.dispatch.split import count_rows, pad_rows, piece_bounds, slice_rows
from phalanx.runtime.future import CallFuture
from phalanx.runtime.values import Readonly, StoredValue
from phalanx.transport.base import Ref, Transport
from phalanx.wire.codec import Encoded, Policy, encode, large_leaves
from phalanx.wire.messages import Message, Piece, RankCall, Reference, Stored, Whole

Hoist = Mapping[type, Callable[[Any], Any]]


class References:
    """The references of one message, and the tokens that name them inside the encoded arguments."""

    def __init__(self, transport: Transport, begin: tuple[Ref, ...] = ()) -> None:
        self._transport = transport
        self.refs: list[Ref] = list(begin)

    def hoist(self) -> Hoist:
        """What the encoder is to replace, by type."""
        table: dict[type, Callable[[Any], Any]] = {
            CallFuture: self._future,
            FuturePiece: self._piece,
            StoredValue: self._stored,
            Readonly: self._readonly,
        }
        return table | dict.fromkeys(self._transport.ref_types(), self._reference)

    def _add(self, ref: Ref) -> int:
        self.refs.append(ref)
        return len(self.refs) - 1

    def _put(self, value: Any, policy: Policy | None = None) -> Stored:
        return Stored(self._add(self._transport.put(encode(value, policy=policy))))

    def _reference(self, ref: Ref) -> Reference:
        return Reference(self._add(ref))

    def _stored(self, stored: StoredValue[Any]) -> Stored:
        if stored.backend != self._transport.name:
            return self._put(stored.get())
        return Stored(self._add(stored.ref))

    def _readonly(self, marked: Readonly[Any]) -> Stored:
        return self._put(marked.value, Policy.READONLY)

    def _future(self, future: CallFuture) -> Stored | Whole:
        parts = future.parts(self._transport)
        if parts is None:
            return self._put(future.result())
        return Whole(tuple(self._add(part.value) for part in parts), future.plan.gather)

    def _piece(self, piece: FuturePiece) -> Piece | Stored:
        future: CallFuture = piece.future
        parts = future.row_parts(self._transport)
        if parts is None:
            return self._put(_rows_of(future.result(), piece))
        return Piece(
            parts=tuple(self._add(part.value) for part in parts),
            infos=tuple(self._add(part.info) for part in parts),
            index=piece.index,
            count=piece.count,
            pad_to_multiple=piece.pad_to_multiple,
            expected_rows=piece.expected_rows,
        )


def _rows_of(value: Any, piece: FuturePiece) -> Any:
    """The piece's rows of a result that had to come through the driver (custom collect, undone padding)."""
    start, stop = piece_bounds(count_rows(value) or 0, piece.count, piece.index)
    rows = slice_rows(value, start, stop)
    return pad_rows(rows, piece.pad_to_multiple) if piece.pad_to_multiple else rows


def messages(transport: Transport, plan: CallPlan, header: RankCall, inline_bytes: int) -> Iterator[Message]:
    """One message per called rank, in the plan's order, each made when it is asked for.

    So the first rank copies its piece while the next one is stored.
    """
    if not any(isinstance(argument, Each) for argument in (*plan.args, *plan.kwargs.values())):
        args, kwargs = plan.arguments_of(0) if plan.ranks else ((), {})
        body, refs = encode_body(transport, (args, kwargs), inline_bytes)
        keeping = header._replace(body=body).pack()
        dropping = header._replace(body=body, keep=False).pack()
        for position in range(len(plan.ranks)):
            yield Message(keeping if plan.keeps(position) else dropping, refs)
        return
    yield from _messages_each(transport, plan, header, inline_bytes)


def _messages_each(
    transport: Transport, plan: CallPlan, header: RankCall, inline_bytes: int
) -> Iterator[Message]:
    shared, begin = _store_shared(transport, plan, inline_bytes)
    columns = [a for a in (*plan.args, *plan.kwargs.values()) if isinstance(a, Each)]
    bodies: dict[tuple[int, ...], tuple[bytes | None, tuple[Ref, ...]]] = {}
    for position in range(len(plan.ranks)):
        # Ranks that get the very same objects (tp, pp and cp peers) get the same stored bytes.
        key = tuple(id(column.values[position]) for column in columns)
        if key not in bodies:
            bodies[key] = encode_body(transport, plan.arguments_of(position), inline_bytes, shared, begin)
        body, refs = bodies[key]
        yield Message(header._replace(body=body, keep=plan.keeps(position)).pack(), refs)


def _store_shared(
    transport: Transport, plan: CallPlan, inline_bytes: int
) -> tuple[dict[int, Stored], tuple[Ref, ...]]:
    """Store large leaves that several ranks get, once; by id of the leaf the token that stands for it."""
    same = [argument.value for argument in (*plan.args, *plan.kwargs.values()) if isinstance(argument, Same)]
    leaves = {id(leaf): leaf for value in (*same, *plan.shared) for leaf in large_leaves(value, inline_bytes)}
    refs = tuple(transport.put(encode(leaf)) for leaf in leaves.values())
    return {key: Stored(index) for index, key in enumerate(leaves)}, refs


def encode_body(
    transport: Transport,
    value: Any,
    inline_bytes: int,
    shared: Mapping[int, Stored] | None = None,
    begin: tuple[Ref, ...] = (),
) -> tuple[bytes | None, tuple[Ref, ...]]:
    """``value`` as the body of a message: bytes for a small one; for a large one None, its reference the last."""
    references = References(transport, begin)
    encoded: Encoded = encode(value, hoist=references.hoist(), shared=shared)
    if encoded.nbytes <= inline_bytes:
        return encoded.to_bytes(), tuple(references.refs)
    return None, (*references.refs, transport.put(encoded))
