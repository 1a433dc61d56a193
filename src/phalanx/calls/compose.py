"""From a plan to the messages of a call: every distinct value is encoded once and, if large, stored once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from phalanx.backends.backend_types import Ref, Ticket
from phalanx.calls.call import Call
from phalanx.calls.counts import process
from phalanx.calls.future import CallFuture
from phalanx.calls.in_flight import wait_for_any
from phalanx.calls.values import Readonly, StoredPart, StoredParts, StoredValue, piece_between
from phalanx.dispatch.plan import CallPlan, Each, FuturePiece, GatherPlan, Same
from phalanx.dispatch.split import check_rows, padded_size, piece_bounds, piece_of
from phalanx.group.group import Group
from phalanx.wire.codec import Encoded, Policy, encode, large_leaves, nbytes_of
from phalanx.wire.messages import (
    Assembled,
    Message,
    RankCall,
    Reference,
    ResultOf,
    Stored,
)
from phalanx.wire.value import Value

Hoist = Mapping[type, Callable[[Any], Any]]

_Key = tuple[int, ...]
_Body = tuple[Encoded, tuple[Ref, ...]]


def store(core: Group, encoded: Encoded, call: Call | None = None) -> Ref:
    """Store a value for the ranks of a group, separate from the messages of a call."""
    nbytes = encoded.nbytes
    ref = core.backend.put(encoded)
    for counts in (core.counts, process):
        counts.stored_bytes += nbytes
    core.room.took(nbytes)
    if call is not None and call.heard.stored:
        call.tell(call.heard.stored, nbytes)
    return ref


class References:
    """The references of a message, and the placeholders that name them inside the encoded arguments."""

    def __init__(self, core: Group, call: Call | None, begin: tuple[Ref, ...] = ()) -> None:
        self._core = core
        self._call = call
        self._backend = core.backend
        self.refs: list[Ref] = list(begin)

    def hoist(self) -> Hoist:
        """Return the replacements of the encoder, by type."""
        table: dict[type, Callable[[Any], Any]] = {
            CallFuture: self._future,
            FuturePiece: self._piece,
            StoredValue: self._stored,
            Readonly: self._readonly,
        }
        table |= dict.fromkeys(StoredParts.kinds, self._stored_parts)
        return table | dict.fromkeys(self._backend.ref_types(), self._reference)

    def _add(self, ref: Ref) -> int:
        self.refs.append(ref)
        return len(self.refs) - 1

    def _put(self, value: Value, policy: Policy | None = None) -> Stored:
        return Stored(self._add(store(self._core, encode(value, policy=policy), self._call)))

    def _passes(self, future: CallFuture[Any]) -> None:
        """Tell listeners that the result of another call is among the arguments."""
        if self._call is not None and self._call.heard.passed:
            self._call.tell(self._call.heard.passed, future.call)

    def _reference(self, ref: Ref) -> Reference:
        return Reference(self._add(ref))

    def _stored(self, stored: StoredValue[Any]) -> Stored:
        if stored.backend != self._backend.name:
            return self._put(stored.get())
        return Stored(self._add(stored.ref))

    def _readonly(self, marked: Readonly[Any]) -> Stored:
        return self._put(marked.value, Policy.READONLY)

    def _stored_parts(self, value: StoredParts) -> Assembled | Stored:
        if value.backend != self._backend.name:
            return self._put(value.result())
        return self._assembled(value.parts, value.joined)

    def _assembled(
        self, parts: Sequence[StoredPart], joined: bool, pad_to_multiple: int | None = None
    ) -> Assembled:
        sources = (
            part.source if isinstance(part.source, bytes) else self._add(part.source) for part in parts
        )
        cuts = ((part.start, part.stop, part.whole) for part in parts)
        return Assembled(tuple(zip(sources, cuts, strict=True)), joined, pad_to_multiple)

    def _piece_of_parts(self, value: StoredParts, piece: FuturePiece) -> Assembled | Stored:
        if value.backend != self._backend.name:
            return self._put(piece_of(value.result(), *_of(piece)))
        parts = piece_between(value, piece.index, piece.count, piece.expected_rows)
        return self._assembled(parts, value.joined, piece.pad_to_multiple)

    def _future(self, future: CallFuture) -> Stored | ResultOf:
        self._passes(future)
        parts = future.parts(self._backend)
        if parts is None:
            return self._put(future.result())
        return ResultOf(tuple(self._add(part.value) for part in parts), future.call.plan.gather)

    def _piece(self, piece: FuturePiece) -> ResultOf | Stored | Assembled:
        if isinstance(piece.future, StoredParts):
            return self._piece_of_parts(piece.future, piece)
        future: CallFuture = piece.future
        self._passes(future)
        gather, parts = future.call.plan.gather, future.parts(self._backend)
        if gather.collect == "list" and parts is not None:
            return self._elements(parts, gather, piece)
        if gather.collect == "first" and parts is not None:
            return ResultOf((self._add(parts[gather.take[0]].value),), replace(gather, take=(0,)), _of(piece))
        parts = future.row_parts(self._backend)
        if parts is None:
            return self._put(piece_of(future.result(), *_of(piece)))
        values = tuple(self._add(part.value) for part in parts)
        return ResultOf(values, gather, _of(piece), tuple(self._add(part.info) for part in parts))

    def _elements(self, parts: Sequence[Ticket], gather: GatherPlan, piece: FuturePiece) -> ResultOf:
        """The piece's share of a list by rank, whose rows are the outputs."""
        total = len(gather.take)
        check_rows(total, piece.expected_rows)
        start, stop = piece_bounds(total, piece.count, piece.index)
        chosen = [start + i % (stop - start) for i in range(padded_size(stop - start, piece.pad_to_multiple))]
        taken = [parts[gather.take[place]] for place in chosen]
        trim = None if gather.trim is None else [gather.trim[place] for place in chosen]
        values = tuple(self._add(part.value) for part in taken)
        return ResultOf(values, GatherPlan("list", range(len(taken)), trim))


def _of(piece: FuturePiece) -> tuple[int, int, int | None, int | None]:
    return piece.index, piece.count, piece.pad_to_multiple, piece.expected_rows


def messages(core: Group, plan: CallPlan, header: RankCall, call: Call | None = None) -> Iterator[Message]:
    """Yield a message for each called rank, in the plan's order, each made when it is needed.

    So the first rank copies its piece while the next piece is stored. All arguments are pickled, and the object store
    has admitted them, before the first message is yielded.

    Raises:
        DispatchError: a value cannot be pickled, or the values to store do not fit into the object store.
    """
    if not any(isinstance(argument, Each) for argument in (*plan.args, *plan.kwargs.values())):
        yield from _messages_alike(core, plan, header, call)
        return
    yield from _messages_each(core, plan, header, call)


def _messages_alike(core: Group, plan: CallPlan, header: RankCall, call: Call | None) -> Iterator[Message]:
    refs: tuple[Ref, ...] = ()
    if plan.ranks and (plan.args or plan.kwargs):
        body, refs = encode_body(core, next(plan.arguments()), call)
        header = header._replace(body=body)
    if len(plan.gather.take) == len(plan.ranks):
        yield from itertools.repeat(header.pack(refs), len(plan.ranks))
        return
    packed: dict[bool, Message] = {}  # by whether the rank's output is kept
    for position in range(len(plan.ranks)):
        keep = plan.keeps(position)
        if keep not in packed:
            packed[keep] = header._replace(keep=keep).pack(refs)
        yield packed[keep]


def _messages_each(core: Group, plan: CallPlan, header: RankCall, call: Call | None) -> Iterator[Message]:
    columns = [a for a in (*plan.args, *plan.kwargs.values()) if isinstance(a, Each)]
    # Ranks that get the very same objects (tp, pp and cp peers) get the same stored bytes.
    keys: list[_Key] = list(zip(*(map(id, column.values) for column in columns), strict=True))
    leaves = _shared_leaves(plan, core.inline_bytes)
    _admit(core, columns, keys, leaves)
    shared = {id(leaf): Stored(index) for index, leaf in enumerate(leaves)}
    begin = tuple(store(core, encode(leaf), call) for leaf in leaves)
    encoded: dict[_Key, _Body] = {}  # views of the caller's memory until a rank needs them
    for key, arguments in zip(keys, plan.arguments(), strict=True):
        if key not in encoded:
            encoded[key] = _encoded_body(core, call, arguments, shared, begin)
    bodies: dict[_Key, tuple[bytes | None, tuple[Ref, ...]]] = {}
    for position, key in enumerate(keys):
        if key not in bodies:
            bodies[key] = _placed(core, call, *encoded.pop(key))
        body, refs = bodies[key]
        yield header._replace(body=body, keep=plan.keeps(position)).pack(refs)


def _shared_leaves(plan: CallPlan, inline_bytes: int) -> list[Any]:
    """The large leaves that several ranks get, each once."""
    same = [argument.value for argument in (*plan.args, *plan.kwargs.values()) if isinstance(argument, Same)]
    found = {id(leaf): leaf for value in (*same, *plan.shared) for leaf in large_leaves(value, inline_bytes)}
    return list(found.values())


def _admit(core: Group, columns: list[Each], keys: list[tuple[int, ...]], leaves: list[Any]) -> None:
    """See to it that there is room for the pieces and the shared leaves; no look at each piece of a small call."""

    known = {id(leaf) for leaf in leaves}

    def piece(position: int) -> int:
        return sum(nbytes_of(column.values[position], _BY_REFERENCE, known) for column in columns)

    whole = sum(map(nbytes_of, leaves))
    first = {key: position for position, key in reversed(list(enumerate(keys)))}
    if whole + piece(0) * len(first) < core.room.unchecked:
        return
    sizes = [size for size in map(piece, first.values()) if size > core.inline_bytes]
    largest = max([*sizes, *map(nbytes_of, leaves)], default=0)
    core.room.admit(whole + sum(sizes), largest, wait=wait_for_any)


_BY_REFERENCE = (CallFuture, FuturePiece, StoredValue)


def encode_body(core: Group, value: Value, call: Call | None = None) -> tuple[bytes | None, tuple[Ref, ...]]:
    """Encode ``value`` as the body of a message: bytes if small; None and a reference, added last, if large.

    Raises:
        DispatchError: it cannot be pickled, or does not fit into the object store.
    """
    encoded, refs = _encoded_body(core, call, value, {}, ())
    if encoded.nbytes > core.inline_bytes:
        core.room.admit(encoded.nbytes, encoded.nbytes, wait=wait_for_any)
    return _placed(core, call, encoded, refs)


def _encoded_body(
    core: Group, call: Call | None, value: Value, shared: Mapping[int, Stored], begin: tuple[Ref, ...]
) -> tuple[Encoded, tuple[Ref, ...]]:
    references = References(core, call, begin)
    encoded = encode(value, hoist=references.hoist(), shared=shared)
    return encoded, tuple(references.refs)


def _placed(
    core: Group, call: Call | None, encoded: Encoded, refs: tuple[Ref, ...]
) -> tuple[bytes | None, tuple[Ref, ...]]:
    if encoded.nbytes <= core.inline_bytes:
        return encoded.to_bytes(), refs
    return None, (*refs, store(core, encoded, call))
